"""Every kernel once, on little data: for compute-sanitizer, which takes long (``make sanitize``). Needs a GPU.

It fails where a kernel is not reached.
"""

import importlib
import sys
import warnings
from collections.abc import Callable
from functools import partial

import torch
from matrix import Driver, Tokens

from foveate import csa, methods, ops
from foveate.hybrids.layers import LearnedEviction, NativeSparseAttention
from foveate.hybrids.state import BlockMemory, RetainedMemory
from foveate.ops import KV, Logits, dispatch
from foveate.ops.attend import attend_selected
from foveate.state.borrowed import cache_of

PROMPT, DECODED = 289, 4
SPECS = (
    "dense",
    "kascade_paper:anchors=[1],top_k=40,min_k=16",
    "kascade:anchors=[1],top_k=40,min_k=16,pooling=post_softmax,decode_only=false",
    "kascade_paper:anchors=[0],top_k=40,min_k=16,decode_only=true",
    "kascade:anchors=[1],top_k=40,min_k=16,pool=kv_head",
    "kascade_pages:top_k=40,min_k=16,pool=kv_head,pooling=post_softmax,anchors=[1]",
    "kascade_pages:top_k=40,min_k=16,anchors=[1]",
    "kascade_pages:top_k=40,min_k=16,pool=kv_head,pooling=post_softmax,anchors=[0],first_layer=pages",
    "oracle_topk:top_k=40,dense_layers=0",
    "quest:top_k=64,dense_layers=0",
    "pages:top_k=64",
    "locks:top_k=64",
    "pages:top_k=64,weighted=false,rank=1",
    "h2o:top_k=64",
    "tova:top_k=64",
    "snapkv:top_k=64,window=16",
    "streaming:window=64",
    "luka:page_size=16,tail=32,score=spread",
    "luka:page_size=16,tail=32,top_k=3,score=spread",
    "luka:page_size=16,tail=32,top_k=3,prior=0.0,score=summary",
    "luka:page_size=[8,32],tail=32,top_k=0.3",
    "luka:page_size=16,tail=32,top_k=3",
)


CAPPED = [
    spec for spec in SPECS if spec.startswith(("h2o", "streaming", "quest", "pages", "locks", "luka:", "kascade"))
]


def main() -> int:
    ran: set[str] = set()
    for name, kernel in dispatch._verbs.items():
        module = importlib.import_module(kernel)
        setattr(module, name, noted(getattr(module, name), name, ran))
    warnings.filterwarnings("error", message=".*slower reference.*")
    for part in parts().values():
        part()
    torch.cuda.synchronize()
    missing = sorted(dispatch._verbs.keys() - ran)
    print(f"{len(ran)} verbs ran on their kernels" + (f"; not reached: {', '.join(missing)}" if missing else ""))
    return bool(missing)


def parts() -> dict[str, Callable[[], None]]:
    """What runs, by name; each part runs some kernel."""
    found = {"selection": select, "lightning indexer": index, "tiles of a prompt": read_tiles}
    for dtype in (torch.float16, torch.float32):
        found[f"chosen keys, {dtype}"] = partial(attend_chosen, dtype)
        found[f"pages in blocks, {dtype}"] = partial(summarise_blocks, dtype)
        found[f"learned eviction, {dtype}"] = partial(evict, dtype)
        found[f"native sparse attention, {dtype}"] = partial(attend_blocks, dtype)
        for spec in SPECS:
            found[f"{spec}, {dtype}"] = partial(decode, spec, dtype)
        for spec in CAPPED:
            found[f"{spec}, capped, {dtype}"] = partial(decode, spec, dtype, 5.0)
    return found


def noted(real, name, ran):
    def run(*args, **how):
        ran.add(name)
        return real(*args, **how)

    return run


def has_fp8() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)


def decode(spec: str, dtype: torch.dtype, softcap: float | None = None) -> None:
    """A prompt and some steps of a middle layer; of the first one where that is the only anchor."""
    tokens = Tokens.random(2, PROMPT + DECODED)
    tokens = Tokens(*(x.to("cuda", dtype) for x in (tokens.q, tokens.k, tokens.v)))
    layer, among = (0, None) if "anchors=[0]" in spec else (1, [1])
    driver = Driver(methods.parse(spec).for_layer(layer, 3, among), PROMPT, softcap)
    driver.feed(tokens[:PROMPT])
    driver.feed_steps(tokens[PROMPT:])


def attend_chosen(dtype: torch.dtype) -> None:
    rows = torch.randn(2, 6, 1, 16, device="cuda").to(dtype)
    keys = torch.randn(2, 2, 300, 16, device="cuda").to(dtype)
    chosen = torch.arange(0, 300, 7, device="cuda", dtype=torch.int32).expand(2, 2, -1)
    ops.attend_indices(rows, KV(keys, keys), chosen, logits=Logits(0.25), heads=torch.tensor([1, 0], device="cuda"))


def summarise_blocks(dtype: torch.dtype) -> None:
    """Of pages that new tokens fill; some tokens are padding."""
    form, keys = ops.PageRecord(16, 8), torch.randn(6, 2, 16, 16, device="cuda").to(dtype)
    records = torch.zeros(6, 2, 2, form.bytes, dtype=torch.uint8, device="cuda")
    slots = torch.tensor([-1, *range(16, 40), 95, -1], dtype=torch.int32, device="cuda")
    ops.compress_written(keys, records, slots, form)


def read_tiles() -> None:
    """As real heads are: on Hopper its own kernels."""
    for dim in (64, 128, 256):
        q, k, v = (torch.randn(1, n, 700, dim, device="cuda", dtype=torch.float16) for n in (8, 2, 2))
        for offset, more in ((0, ""), (200, ""), (200, ",dense_anchor_prefill=false")):
            forward, own = {}, (q[:, :, offset:], k, v)
            for layer in (1, 2):
                method = methods.parse(f"kascade_paper:anchors=[0,1],min_k=150{more}").for_layer(layer, 3)
                method.prompt(cache_of(*own[1:], 8, forward), own[0], 0.1)


def evict(dtype: torch.dtype) -> None:
    """A prompt of two pieces and some steps."""
    layer = LearnedEviction(64, 4, 2, 16, window=30, buffer=12).to("cuda", dtype).eval()
    x, at = (
        torch.randn(2, PROMPT + DECODED, 64, device="cuda", dtype=dtype),
        torch.arange(PROMPT + DECODED)[None].cuda(),
    )
    memory = RetainedMemory(layer.window, layer.buffer)
    for first, last in ((0, 200), (200, PROMPT), *((token, token + 1) for token in range(PROMPT, PROMPT + DECODED))):
        layer(x[:, first:last], at[:, first:last], memory)


def attend_blocks(dtype: torch.dtype) -> None:
    """A prompt and some steps, one of which completes a block."""
    layer = NativeSparseAttention(64, 4, 2, 16, block=8, blocks=4, window=20).to("cuda", dtype).eval()
    x, memory = torch.randn(2, PROMPT + 8, 64, device="cuda", dtype=dtype), BlockMemory(layer.block)
    at = torch.arange(PROMPT + 8, device="cuda")[None]
    layer(x[:, :PROMPT], at[:, :PROMPT], memory)
    for token in range(PROMPT, PROMPT + 8):
        layer(x[:, token : token + 1], at[:, token : token + 1], memory)


def select() -> None:
    for number in (333, 40_000, 150_001):
        scores, counts = torch.rand(2, 3, number, device="cuda"), torch.tensor([number // 10, 5], device="cuda")
        ops.topk_rows(scores, counts, number // 10)
        ops.topk_rows(scores.round(), counts, number // 10, dtype=torch.int32)
        for k in (64, 1500):
            blocks = torch.nn.functional.pad(scores, (0, -number % 16)).unflatten(-1, (-1, 16)).amax(-1)
            ops.select.topk_of_blocks(scores, blocks, torch.tensor([0, number // 2, number], device="cuda"), k, 16)


def index() -> None:
    q, k = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((1, 70, 64, 128), (1, 900, 128)))
    weights = torch.rand(1, 70, 64, device="cuda")
    for fp8 in (False, True):
        if fp8 and not has_fp8():
            continue
        (q_, _), (k_, scales) = (csa.to_fp8(q), csa.to_fp8(k)) if fp8 else ((q, None), (k, None))
        csa.lightning_indexer(q_, k_, weights, 40, ratio=4, offset=3600, key_scales=scales)
    for heads, kv_heads, dim in ((64, 1, 512), (8, 2, 64)):
        q, k = (torch.randn(1, n, 70, dim, device="cuda", dtype=torch.bfloat16) for n in (heads, kv_heads))
        chosen = torch.randint(-1, 70, (1, kv_heads, 70, 24), device="cuda", dtype=torch.int32)
        attend_selected(q, KV(k, k), chosen.sort(-1, descending=True).values, scaling=0.1)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
