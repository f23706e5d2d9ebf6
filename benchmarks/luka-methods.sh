# What the benchmarks share: LuKA's methods, which cells are asked for, and longer contexts of a model.

# A cell is one results file. CELLS="NAME NAME" runs these alone, so that several GPUs can share a benchmark; every cell
# resumes where it stopped.
wanted() { [[ -z ${CELLS:-} || " $CELLS " == *" $1 "* ]]; }

# Sequences of LENGTH tokens in a batch of about TOKENS, which is what fits a GPU.
batch() { # TOKENS LENGTH
  local rows=$(($1 / $2))
  echo $((rows < 1 ? 1 : rows > 300 ? 300 : rows))
}

# The arguments that import the files of benchmarks/methods/ whose methods are among these.
imported() { # METHOD...
  local file name
  for file in "$(dirname "${BASH_SOURCE[0]}")"/methods/*.py; do
    name=$(basename "$file" .py)
    [[ $* != *"$name"* ]] || printf -- '--import\n%s\n' "$file"
  done
}

# The same weights in another folder, with YaRN for 132,000 tokens; as they are if the model has as many positions.
with_yarn() { # MODEL FOLDER
  mkdir -p "$2"
  ln -sf "$(realpath "$1")"/* "$2"
  rm -f "$2/config.json"
  python - "$1" "$2" <<'END'
import sys

import transformers

config = transformers.AutoConfig.from_pretrained(sys.argv[1])
known = config.max_position_embeddings
if known < 132000:
    kind = config.rope_parameters.get("rope_type", "default")
    if kind != "default":
        sys.exit(f"{sys.argv[1]}: its positions are scaled already ({kind}), to {known} tokens: YaRN is not added")
    yarn = {"rope_type": "yarn", "factor": 132000 / known, "original_max_position_embeddings": known}
    config.max_position_embeddings, config.rope_parameters = 132000, config.rope_parameters | yarn
config.save_pretrained(sys.argv[2])
END
}

methods() { printf -- '--method\n%s\n' "$@"; }

# Table 1 of the paper: its three modes by its text, by its code (exact mass, entropy bias) and corrected; ours with its
# three pages, as recommended, and with pages ranked by their spread.
table1=(
  dense h2o h2o_as_published
  luka_paper luka_paper:mass=exact,bias=entropy luka_paper:mass=exact,bias=log,pool=kv_head
  luka:page_size=16,top_k=3 luka luka:score=spread
  mixed:clustered=luka_paper mixed
)

# From a fortieth to a quarter of the keys, every family at about the same shares of a long context.
frontier=(
  dense
  luka luka:top_k=0.06,expand=0.2 luka:top_k=0.02,expand=0.1 luka:page_size=[16,64],top_k=0.02,expand=0.1
  luka:page_size=16,top_k=0.12 luka:score=spread luka:top_k=0.02,expand=0.1,score=spread
)
for share in 0.025 0.05 0.1 0.25; do
  frontier+=("h2o:top_k=$share,window=64" "snapkv:top_k=$share" "tova:top_k=$share" "streaming:window=$share")
done
