"""Does a step take a model that nobody chose: one of every family of timm, and every kind of model of transformers?

    python benchmarks/families.py timm|transformers [--sizes "Llama;Mamba"] [--out benchmarks/results]

timm: of every family a small model, in bfloat16. transformers: of every model behind its Auto classes for language
and images the first class, from its own configuration with every known size made small, in float16 with a scale
that overflows first; in bfloat16 where every step overflows. As `coverage.py --parity` otherwise: the same steps of
torch's loop, of the eager step, and traced. What cannot be built so, is too large, takes too long or fails in torch's
own loop is listed, and says nothing about funcamp.
"""

from __future__ import annotations

import functools
import logging
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from _public import without_operators
from _timing import Report, Row, about, arguments, chosen
from _zoo import LABELS, SIDE, VOCABULARY, Task
from coverage import measure_model

SECONDS = 120
LARGEST = 40_000_000
#: The dtype, and the steps: convolutions take a second each in float16 on a CPU, and no step overflows in bfloat16.
RUNS = {"timm": ("bfloat16", 4), "transformers": ("float16", 12)}

SMALL = re.compile(r"test_|atto|femto|pico|nano|xxs|tiny|_t$|_s0|_050|_035|small|mini|b0|18|_00[248]")


@functools.cache
def smallest(family: str) -> tuple[str, dict[str, int], int]:
    """The smallest of the five models of a family whose names say small, its options and the side of its images."""
    import timm

    names = sorted(timm.list_models(module=family), key=lambda name: (not SMALL.search(name), len(name), name))
    sizes = {}
    with torch.device("meta"):
        for name in names[:5]:
            sizes[name] = sum(value.numel() for value in timm.create_model(name, num_classes=LABELS).parameters())
    name = min(sizes, key=sizes.__getitem__)
    if sizes[name] > LARGEST:
        raise ValueError(f"{name} has {sizes[name]:,} parameters")
    for options in ({"img_size": 64}, {}):
        try:
            model: Any = timm.create_model(name, num_classes=LABELS, **options)
            with torch.no_grad():
                model(torch.randn(2, 3, 64, 64))
            return name, options, 64
        except (TypeError, ValueError, AssertionError, RuntimeError):
            continue
    return name, {}, model.default_cfg["input_size"][-1]


def timm_family(family: str) -> Task:
    """A model of a family, for images of 64 pixels if it takes them."""
    import timm

    name, options, side = smallest(family)
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=LABELS, **options)
    with torch.no_grad():
        model(torch.randn(2, 3, side, side))  # it may fill a buffer
    return Task(model, lambda: (torch.randn(2, 3, side, side), torch.randint(LABELS, (2,))), first_cross_entropy)


def first_cross_entropy(output: Any, target: torch.Tensor) -> torch.Tensor:
    """The loss of a classifier's output, or of the first of several."""
    return F.cross_entropy((output[0] if isinstance(output, (tuple, list)) else output).float(), target)


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape or (2, 16))


def _words() -> dict[str, Any]:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens}


def _pictures() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, SIDE, SIDE)}


def _classes() -> torch.Tensor:
    return torch.randint(LABELS, (2,))


#: The Auto classes, and the batches of their models.
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "CAUSAL_LM": _words,
    "MASKED_LM": lambda: {**_words(), "attention_mask": torch.ones(2, 16, dtype=torch.int64)},
    "SEQ_TO_SEQ_CAUSAL_LM": _words,
    "PRETRAINING": _words,
    "SEQUENCE_CLASSIFICATION": lambda: {"input_ids": _tokens(), "labels": _classes()},
    "TOKEN_CLASSIFICATION": lambda: {"input_ids": _tokens(), "labels": torch.randint(LABELS, (2, 16))},
    "MULTIPLE_CHOICE": lambda: {"input_ids": _tokens(2, 2, 16), "labels": torch.randint(2, (2,))},
    "IMAGE_CLASSIFICATION": lambda: {**_pictures(), "labels": _classes()},
    "MASKED_IMAGE_MODELING": _pictures,
    "SEMANTIC_SEGMENTATION": lambda: {**_pictures(), "labels": torch.randint(LABELS, (2, SIDE, SIDE))},
}

#: Attributes of configurations, by what is written to them.
SIZES = {
    VOCABULARY: "vocab_size",
    SIDE: "hidden_size n_embd d_model dim embed_dim embedding_size emb_dim rnn_dim moe_intermediate_size image_size "
    "shared_expert_intermediate_size",
    64: "n_ctx n_positions max_position_embeddings max_seq_len intermediate_size ffn_dim d_ff d_inner hidden_dim "
    "encoder_ffn_dim decoder_ffn_dim ffn_hidden_size n_inner",
    16: "q_lora_rank kv_lora_rank",
    8: "head_dim d_kv d_head patch_size qk_nope_head_dim v_head_dim sliding_window linear_key_head_dim "
    "linear_value_head_dim state_size num_buckets",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts linear_num_value_heads qk_rope_head_dim rotary_dim",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers num_key_value_heads num_experts_per_tok linear_num_key_heads",
    LABELS: "num_labels",
    0: "layerdrop encoder_layerdrop decoder_layerdrop",
}
#: A configuration that these sizes contradict is tried without one of them.
LEFT_OUT = ("", "head_dim", "num_key_value_heads", "intermediate_size", "hidden_dim")


def configured(kind: Any) -> Any:
    """A configuration whose known sizes are small."""
    usual = kind()
    failed = ValueError()
    sizes = {name: value for value, names in SIZES.items() for name in names.split()}
    known = {name: value for name, value in sizes.items() if type(getattr(usual, name, None)) in (int, float)}
    for left_out in LEFT_OUT:
        try:
            config = kind(**{name: value for name, value in known.items() if name != left_out})
        except Exception as error:
            failed = error  # type: ignore[assignment]
            continue
        for number, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
            setattr(config, name, number)
        config.decoder_start_token_id = 0
        layers = getattr(config, "layer_types", None)
        if layers is not None and len(layers) != config.num_hidden_layers:
            config.layer_types = layers[: config.num_hidden_layers]
        return config
    raise failed


def hugging(config: str, name: str, batch: Callable[[], Any]) -> Task:
    """A model of transformers."""
    import transformers

    small = configured(getattr(transformers, config))
    kind = getattr(transformers, name)
    with torch.device("meta"):
        count = sum(value.numel() for value in kind(small).parameters())
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters")
    torch.manual_seed(0)
    return Task(kind(small), batch)


def models(package: str) -> dict[str, Callable[[], Task]]:
    """Names of families or classes, and how to make their models."""
    with without_operators():
        import torchvision  # noqa: F401  what timm and transformers import
    if package == "timm":
        import timm

        return {family: functools.partial(timm_family, family) for family in sorted(timm.list_modules())}
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found: dict[str, Callable[[], Task]] = {}
    seen = set()
    for kind, batch in KINDS.items():
        for model, given in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").items():
            name = given if isinstance(given, str) else given[0]
            if model not in seen:
                found[name] = functools.partial(hugging, CONFIG_MAPPING_NAMES[model], name, batch)
            seen.add(model)
    return found


class TooLong(BaseException):
    """A row's time is over. No Exception: those are results."""


def row(name: str, make: Callable[[], Task], dtype: str, steps: int) -> Row:
    """The row of a model; "failed" where nothing of funcamp was reached."""

    def seeded() -> Task:
        torch.manual_seed(0)
        return make()

    def stop(*_: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        try:
            seeded()
        except Exception as error:
            return {"size": name, "variant": dtype, "failed": f"not built: {type(error).__name__}"}
        found = measure_model(name, seeded, dtype, parity=True, steps=steps)
        overflows = found.get("skips") == steps
        return measure_model(name, seeded, "bfloat16", parity=True, steps=steps) if overflows else found
    except TooLong:
        return {"size": name, "variant": dtype, "failed": f"more than {SECONDS} s"}
    finally:
        signal.alarm(0)


def counted(rows: list[Row]) -> Iterator[str]:
    """What all rows come to."""
    ran = [row for row in rows if "failed" not in row]
    same = ("bit for bit", "equal scales")
    for key, label in (("eager", "the eager step"), ("traced", "jit")):
        takes = [row for row in ran if row[key].startswith(same)]
        yield f"of {len(ran)} models {label} takes {len(takes)} with equal scales and skips, "
        yield f"{sum(row[key] == same[0] for row in takes)} of them bit for bit; "


def main() -> None:
    """Run all, and write what is known after each."""
    parser = arguments(__doc__)
    parser.add_argument("package", choices=RUNS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    known = models(args.package)
    names = chosen(parser, args, dict.fromkeys(known))
    columns = {"model": "size", "dtype": "variant", "parameters": "parameters", "skipped": "skips"}
    dtype, steps = RUNS[args.package]
    facts = about("cpu", steps=steps, **{args.package: __import__(args.package).__version__})
    title = f"Every family of {args.package}"
    report = Report(
        args.out, f"families-{args.package}-cpu", title, facts, columns | {"eager step": "eager", "traced": "traced"}
    )
    for name in names:
        report.add([row(name, known[name], dtype, steps)])
    print("".join(counted(report.rows)))


if __name__ == "__main__":
    main()
