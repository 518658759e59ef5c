"""Models that others published, for `step.py --public`: GPT-2 of transformers, others of timm. Random weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from _models import Size, cross_entropy
from torch import Tensor, nn

PACKAGES = ("timm", "transformers", "torchvision")
PACKAGES_ON_A_GPU = ("timm", "torchvision")
LABELS = 10

#: A size's context is the tokens of a sequence, or the pixels of an image's side.
PUBLIC_SIZES = {
    "GPT-2 3.4 M": Size("gpt2", 4, 256, 4, 64, 1000, steps=5),
    "ViT-Ti/16 5.5 M": Size("vit_tiny_patch16_224", 12, 192, 8, 64, steps=5),
    "Mixer-S/32 18.6 M": Size("mixer_s32_224", 8, 512, 4, 224, steps=3),
    "ConvNeXt-Atto 3.4 M": Size("convnext_atto", 12, 320, 8, 64, steps=5),
    "ResNet-18 11 M": Size("resnet18", 8, 512, 8, 64, steps=5),
}
PUBLIC_GPU_SIZES = {
    "ResNet-50 24 M": Size("resnet50", 16, 2048, 64, 224, steps=10),
    "ConvNeXt-Tiny 28 M": Size("convnext_tiny", 18, 768, 64, 224, steps=10),
    "ViT-B/16 86 M": Size("vit_base_patch16_224", 12, 768, 64, 224, steps=10),
}


def public_task(size: Size, device: str = "cpu") -> tuple[nn.Module, Any, Callable[[Any, Tensor], Tensor] | None]:
    """A fresh model, one batch, and the criterion; None where the model returns its loss."""
    with without_operators():
        import torchvision  # noqa: F401  what timm and transformers import
    torch.manual_seed(0)
    if size.kind == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=size.vocabulary,
            n_positions=size.context,
            n_embd=size.width,
            n_layer=size.blocks,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
        tokens = torch.randint(size.vocabulary, (size.batch, size.context)).to(device)
        return GPT2LMHeadModel(config).to(device), {"input_ids": tokens, "labels": tokens}, None
    import timm

    resized = {"img_size": size.context} if size.kind.startswith("vit") else {}
    model = timm.create_model(size.kind, num_classes=LABELS, **resized).to(device)
    images = torch.randn(size.batch, 3, size.context, size.context).to(device)
    return model, (images, torch.randint(LABELS, (size.batch,)).to(device)), cross_entropy


@contextlib.contextmanager
def without_operators() -> Iterator[None]:
    """Context manager: let torchvision be imported without its compiled operators.

    The torchvision of PyPI is built for CUDA: beside a torch for CPUs its library does not load, and its import fails
    since it registers shapes for operators that are then unknown (torchvision 0.28). No model here uses one.
    """
    register = torch.library.register_fake

    def register_known(name: Any, *args: Any, **kwargs: Any) -> Any:
        if str(name).startswith("torchvision::"):
            return lambda fn: fn
        return register(name, *args, **kwargs)

    with mock.patch("torch.library.register_fake", register_known):
        yield
