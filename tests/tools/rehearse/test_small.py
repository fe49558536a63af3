"""Models and layouts of launch scripts at small sizes."""

from __future__ import annotations

import pytest

from agl_slime.tools.rehearse.megatron.small import PARALLEL, shrink, small_layout, small_sizes, values_of

DENSE = "--num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --vocab-size 151936"
EXPERTS = f"{DENSE} --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-layer-freq [0]*3+[1]*33"


@pytest.mark.parametrize(
    ("flags", "gpus", "sizes", "changes"),
    [
        ("", 1, (1, 1, 1, 1, 1), ""),
        ("", 64, (8, 1, 1, 1, 1), "dp 64 to 8"),
        ("tp 2, pp 2, ep 2, etp 1", 32, (2, 2, 2, 1, 2), "dp 8 to 2"),
        ("tp 8, pp 4, cp 4, ep 32, etp 1", 128, (1, 2, 2, 2, 2), "tp 8 to 2, pp 4 to 2, cp 4 to 2, ep 32 to 2"),
        ("tp 4, cp 2", 16, (1, 4, 1, 2, 1), "dp 2 to 1"),
        ("tp 2, pp 8, cp 4, ep 16", 128, (1, 2, 2, 2, 2), "pp 8 to 2, cp 4 to 2, ep 16 to 2, dp 2 to 1"),
    ],
)
def test_data_parallel_ranks_go_first(flags: str, gpus: int, sizes: tuple[int, ...], changes: str):
    layout, changed = small_layout(values(f"{EXPERTS} {long_of(flags)}"), gpus)
    assert tuple(layout[name] for name in ("dp", "tp", "pp", "cp", "ep")) == sizes
    assert sorted(changed) == sorted(filter(None, changes.split(", ")))


@pytest.mark.parametrize("heads", [14, 15, 28, 32, 40, 96])
@pytest.mark.parametrize("groups", [None, 2, 3, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_heads_divide_as_the_scripts_do(heads: int, groups: int | None, tp: int):
    flags = f"{DENSE} --num-attention-heads {heads} --tensor-model-parallel-size {tp}"
    flags += f" --num-query-groups {groups}" if groups else ""
    layout, _ = small_layout(values(flags), 8)
    small = small_sizes(values(flags), layout | {"tp": min(tp, 2)}, tokens=460)
    if groups is None:
        assert (small["num-attention-heads"] % min(tp, 2) == 0) == (heads % tp == 0 or tp == 1)
    elif heads % groups == 0:
        kept = small["num-query-groups"]
        assert small["num-attention-heads"] / kept == heads / groups
        assert (kept % min(tp, 2) == 0 or min(tp, 2) % kept == 0) == (groups % tp == 0 or tp % groups == 0)


@pytest.mark.parametrize(("vocabulary", "divisor", "tp"), [(151936, 128, 1), (151936, 128, 2), (128256, 64, 2)])
def test_a_vocabulary_is_padded_where_the_scripts_is(vocabulary: int, divisor: int, tp: int):
    words = (
        f"{DENSE} --vocab-size {vocabulary} --make-vocab-size-divisible-by {divisor} --tensor-model-parallel-size {tp}"
    )
    size = small_sizes(values(words), {"tp": tp, "ep": 1}, tokens=460)["vocab-size"]
    assert size >= 460
    assert (size % (divisor * tp) == 0) == (vocabulary % (divisor * tp) == 0)


def test_a_checkpoint_that_differs_from_the_options_still_does():
    config = {"model_type": "qwen3_moe", "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"first_k_dense_replace": 4, "head_dim": 128, "num_hidden_layers": 36, "vocab_size": 151936}
    config["rms_norm_eps"] = 1e-6
    flags = f"{EXPERTS} --num-query-groups 4 --kv-channels 128".split()
    small = shrink(flags, gpus=8, tokens=460, config=config)
    assert small.options["num-query-groups"] == 2 != small.config["num_key_value_heads"]
    assert small.config["head_dim"] == small.options["kv-channels"]
    assert small.config["rms_norm_eps"] == 1e-6
    assert (small.options["moe-layer-freq"], small.config["first_k_dense_replace"]) == ("[0]*1+[1]*3", 2)
    assert (small.ranks, small.changes) == (8, ())


def values(flags: str) -> dict[str, str]:
    return values_of(flags.split())


def long_of(flags: str) -> str:
    names = {short: long for long, short in PARALLEL.items()}
    return " ".join(f"--{names[part.split()[0]]}-parallel-size {part.split()[1]}" for part in flags.split(", ") if part)
