#!/usr/bin/env bash
# Runs jobs on all GPUs of a host, several at a time on each: the cells of a benchmark, say.
#   benchmarks/spread.sh FOLDER [JOBS_PER_GPU]
# Takes FOLDER/todo/*.sh in the order of their names, and those that are put there meanwhile; moves each to
# FOLDER/running, then to FOLDER/done or FOLDER/failed; what it prints is in FOLDER/logs. NAME.alone.sh gets a GPU for
# itself, for timings, as soon as no other one runs there: put it first. Ends when nothing is left to do, or with
# FOLDER/wait present when that is gone, too. Jobs that an earlier run has left in running or failed are taken again.
# Exits with 1 if a job failed.
set -uo pipefail
: "${1:?a folder of jobs, see above}"
folder=$(realpath "$1") slots=${2:-1}
gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader) || { echo "no GPU here" >&2; exit 1; }
mkdir -p "$folder"/{todo,running,done,failed,logs}
rm -rf "$folder"/gpu*.taken
find "$folder/running" "$folder/failed" -name '*.sh' -exec mv -t "$folder/todo" {} +

work() { # GPU
  local job name lock
  while :; do
    if [ -e "$folder/gpu$1.taken" ]; then # by a job that wants it for itself, or waits for that
      sleep 1
      continue
    fi
    for job in "$folder"/todo/*.sh; do
      name=$(basename "$job")
      mv "$job" "$folder/running/" 2> /dev/null && break # another may have taken it
      name=
    done
    if [ -z "$name" ]; then
      [ -e "$folder/wait" ] || compgen -G "$folder/todo/*.sh" > /dev/null || return 0
      sleep 1
      continue
    fi
    lock=--shared
    if [[ $name == *.alone.sh ]]; then
      lock=--exclusive
      mkdir "$folder/gpu$1.taken" 2> /dev/null || { mv "$folder/running/$name" "$folder/todo/"; continue; }
    fi
    if CUDA_VISIBLE_DEVICES=$1 flock "$lock" "$folder/gpu$1" bash "$folder/running/$name" &> "$folder/logs/$name.log"; then
      mv "$folder/running/$name" "$folder/done/"
    else
      mv "$folder/running/$name" "$folder/failed/"
    fi
    [ $lock = --shared ] || rmdir "$folder/gpu$1.taken"
  done
}

for ((slot = 0; slot < slots; slot++)); do
  for gpu in $gpus; do
    work "$gpu" &
  done
done
wait
! compgen -G "$folder/failed/*.sh" > /dev/null
