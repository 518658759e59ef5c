"""Models that others published, small and with random weights, for `coverage.py`: with their batches and losses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _public import without_operators
from torch import Tensor, nn
from torch.distributions import Bernoulli, Normal, kl_divergence

LABELS = 10
VOCABULARY = 96
SIDE = 32


class Task(NamedTuple):
    """A model to train."""

    model: nn.Module
    batch: Callable[[], Any]
    """Draws a batch from torch's generator."""
    criterion: Callable[[Any, Any], Tensor] | None = None
    """None where the model returns its loss."""


def _images(model: nn.Module, side: int = SIDE, count: int = 2) -> Task:
    def batch() -> Any:
        return torch.randn(count, 3, side, side), torch.randint(LABELS, (count,))

    return Task(model, batch, lambda output, target: F.cross_entropy(output.float(), target))


def _timm(name: str, side: int = SIDE, **options: Any) -> Task:
    import timm

    return _images(timm.create_model(name, num_classes=LABELS, **options), side)


def _tokens(length: int = 16, count: int = 2) -> Tensor:
    return torch.randint(3, VOCABULARY, (count, length))


def _labelled(*names: str, length: int = 16) -> dict[str, Tensor]:
    tokens = _tokens(length)
    return dict.fromkeys(names, tokens)


def _causal(kind: str, **options: Any) -> Task:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options
    )
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, name)(config)
    return Task(model, lambda: _labelled("input_ids", "labels"))


_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "head_dim": 8}


def _masked(kind: str) -> Task:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, pad_token_id=0, max_position_embeddings=64, **_SMALL
    )
    model = getattr(transformers, f"{kind}ForMaskedLM")(config)

    def batch() -> Any:
        return {**_labelled("input_ids", "labels"), "attention_mask": torch.ones(2, 16, dtype=torch.int64)}

    return Task(model, batch)


def _sequence(kind: str) -> Task:
    import transformers

    sizes = {"d_model": 32, "decoder_start_token_id": 0, "vocab_size": VOCABULARY, "pad_token_id": 0}
    if kind == "T5":
        sizes |= {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    else:
        sizes |= {f"{side}_{what}": count for side in ("encoder", "decoder") for what, count in _LAYERS.items()}
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(getattr(transformers, f"{kind}Config")(**sizes))
    return Task(model, lambda: _labelled("input_ids", "labels"))


_LAYERS = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}


def _hugging_vit() -> Task:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(image_size=SIDE, patch_size=8, num_labels=LABELS, **_SMALL))
    return Task(model, lambda: {"pixel_values": torch.randn(2, 3, SIDE, SIDE), "labels": torch.randint(LABELS, (2,))})


def _clip() -> Task:
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(
        text_config={"vocab_size": VOCABULARY, "max_position_embeddings": 16, **_SMALL},
        vision_config={"image_size": SIDE, "patch_size": 8, **_SMALL},
        projection_dim=16,
    )

    def batch() -> Any:
        return {"input_ids": _tokens(), "pixel_values": torch.randn(2, 3, SIDE, SIDE), "return_loss": True}

    return Task(CLIPModel(config), batch)


def _whisper() -> Task:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {f"{side}_{what}": count for side in ("encoder", "decoder") for what, count in _LAYERS.items()}
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        num_mel_bins=16,
        max_source_positions=24,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **sizes,
    )

    def batch() -> Any:
        return {"input_features": torch.randn(2, 16, 48), "labels": _tokens()}

    return Task(WhisperForConditionalGeneration(config), batch)


def _wav2vec2() -> Task:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    config = Wav2Vec2Config(num_labels=LABELS, **_SOUND)
    return Task(
        Wav2Vec2ForSequenceClassification(config),
        lambda: {"input_values": torch.randn(2, 800), "labels": torch.randint(LABELS, (2,))},
    )


def _detection() -> Task:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    sizes = {f"{side}_{what}": count for side in ("encoder", "decoder") for what, count in _LAYERS.items()}
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=32,
        num_queries=4,
        num_labels=LABELS,
        **sizes,
    )

    def batch() -> Any:
        label = {"class_labels": torch.randint(LABELS, (1,)), "boxes": torch.rand(1, 4) / 2 + 0.2}
        return {"pixel_values": torch.randn(1, 3, SIDE, SIDE), "labels": [label]}

    return Task(DetrForObjectDetection(config), batch)


def _segmentation() -> Task:
    import torchvision

    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=4
    )

    def batch() -> Any:
        return torch.randn(2, 3, 64, 64), torch.randint(4, (2, 64, 64))

    return Task(model, batch, lambda output, target: F.cross_entropy(output["out"].float(), target))


def _segformer() -> Task:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=4,
    )

    def batch() -> Any:
        return {"pixel_values": torch.randn(2, 3, SIDE, SIDE), "labels": torch.randint(4, (2, SIDE, SIDE))}

    return Task(SegformerForSemanticSegmentation(config), batch)


def _hugging(name: str, batch: Callable[[], Any], **options: Any) -> Task:
    import transformers

    kind = name.split("For")[0].removesuffix("LMHeadModel").removesuffix("Model")
    return Task(getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**options)), batch)


def _words() -> dict[str, Tensor]:
    return _labelled("input_ids", "labels")


def _pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, SIDE, SIDE), "labels": torch.randint(LABELS, (2,))}


def _pairs() -> dict[str, Any]:
    return {"input_ids": _tokens(), "pixel_values": torch.randn(2, 3, SIDE, SIDE), "return_loss": True}


def _films() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, 4, 3, SIDE, SIDE), "labels": torch.randint(LABELS, (1,))}


def _speech() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 1600), "labels": torch.randint(1, VOCABULARY, (2, 6))}


def _series() -> dict[str, Tensor]:
    return {"past_values": torch.randn(2, 32, 2), "future_values": torch.randn(2, 8, 2)}


_PATCHES = {"image_size": SIDE, "patch_size": 8}
_SOUND = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,  # its masks are drawn by numpy
    "layerdrop": 0.0,  # read on the host
    **_SMALL,
}


class _Denoiser(nn.Module):
    """A diffusion model with its loss: the noise that was added at a random time."""

    def __init__(self, net: nn.Module, labels: int | None = None) -> None:
        super().__init__()
        self.net = net
        self.labels = labels

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        noise, time = torch.randn_like(image), torch.randint(1000, (image.shape[0],), device=image.device)
        share = (time / 1000).view(-1, 1, 1, 1)
        extra = {} if self.labels is None else {"class_labels": label}
        found = self.net(image * (1 - share) + noise * share, timestep=time, **extra).sample
        return F.mse_loss(found.float(), noise)


def _diffusion(kind: str) -> Task:
    import diffusers

    if kind == "unet":
        net: Any = diffusers.UNet2DModel(
            sample_size=16,
            in_channels=3,
            out_channels=3,
            layers_per_block=1,
            block_out_channels=(16, 32),
            norm_num_groups=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
        model = _Denoiser(net)
    else:
        net = diffusers.DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=3,
            out_channels=3,
            num_layers=2,
            sample_size=16,
            patch_size=4,
            norm_num_groups=1,
            num_embeds_ada_norm=1000,
        )
        model = _Denoiser(net, LABELS)
    return Task(model, lambda: {"image": torch.randn(2, 3, 16, 16), "label": torch.randint(LABELS, (2,))})


class _Graphs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        from torch_geometric import nn as layers

        made = {"GCN": layers.GCNConv, "GAT": layers.GATConv, "SAGE": layers.SAGEConv}[kind]
        self.first = made(16, 32)
        self.second = made(32, LABELS)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(F.dropout(F.relu(self.first(x, edges)), training=self.training), edges)  # type: ignore[no-any-return]


def _graphs(kind: str) -> Task:
    def batch() -> Any:
        return torch.randn(30, 16), torch.randint(30, (2, 80)), torch.randint(LABELS, (30,))

    return Task(_Graphs(kind), batch, lambda output, target: F.cross_entropy(output.float(), target))


class _Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = kind(16, 32, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))[0])  # type: ignore[no-any-return]


def _recurrent(kind: Callable[..., nn.RNNBase]) -> Task:
    def batch() -> Any:
        tokens = _tokens(9)
        return tokens[:, :-1], tokens[:, 1:]

    return Task(
        _Recurrent(kind), batch, lambda output, target: F.cross_entropy(output.float().flatten(0, 1), target.flatten())
    )


class _Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        hidden = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(hidden)  # type: ignore[no-any-return]


def _translator() -> Task:
    def batch() -> Any:
        tokens = _tokens(9)
        return _tokens(8), tokens[:, :-1], tokens[:, 1:]

    return Task(
        _Translator(), batch, lambda output, target: F.cross_entropy(output.float().flatten(0, 1), target.flatten())
    )


class _Autoencoder(nn.Module):
    """A variational autoencoder, of torch.distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 24))

    def forward(self, x: Tensor) -> Any:
        mean, log_scale = self.encoder(x).float().chunk(2, -1)
        posterior = Normal(mean, log_scale.exp())
        rebuilt = Bernoulli(logits=self.decoder(posterior.rsample()).float())
        prior = Normal(torch.zeros_like(mean), torch.ones_like(mean))
        likelihood = rebuilt.log_prob(x)  # type: ignore[no-untyped-call]
        return (kl_divergence(posterior, prior).sum(-1) - likelihood.sum(-1)).mean()


def _autoencoder() -> Task:
    return Task(_Autoencoder(), lambda: {"x": (torch.rand(8, 24) > 0.5).float()})


class _Recommender(nn.Module):
    """DLRM: embeddings of categories and a small network of numbers, and the products of each pair."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 10, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        numbers = self.bottom(dense)
        found = [numbers, *(bag(part) for bag, part in zip(self.bags, categories.unbind(1)))]
        stacked = torch.stack([part.to(numbers.dtype) for part in found], 1)
        products = stacked @ stacked.transpose(1, 2)
        rows, columns = torch.tril_indices(5, 5, -1, device=dense.device)
        return self.top(torch.cat([numbers, products[:, rows, columns]], 1))[:, 0]  # type: ignore[no-any-return]


def _recommender() -> Task:
    def batch() -> Any:
        return torch.randn(8, 6), torch.randint(50, (8, 4, 3)), torch.randint(2, (8,)).float()

    return Task(
        _Recommender(),
        batch,
        lambda output, target: F.binary_cross_entropy_with_logits(output.float(), target),
    )


def _adapters() -> Task:
    import peft

    base = _causal("Llama", **_GROUPED)
    return Task(peft.get_peft_model(base.model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])), base.batch)


_make = functools.partial
ZOO: dict[str, Callable[[], Task]] = {
    "timm resnet18": _make(_timm, "resnet18"),
    "timm resnetv2_50, weight standardization": _make(_timm, "resnetv2_50", layers=(1, 1, 1, 1)),
    "timm mobilenetv3_small_050": _make(_timm, "mobilenetv3_small_050"),
    "timm efficientnet_b0, stochastic depth": _make(_timm, "efficientnet_b0", drop_path_rate=0.2),
    "timm convnext_atto": _make(_timm, "convnext_atto", drop_path_rate=0.1),
    "timm regnetx_002": _make(_timm, "regnetx_002"),
    "timm densenet121": _make(_timm, "densenet121", block_config=(2, 2, 2, 2)),
    "timm vit_tiny, stochastic depth": _make(
        _timm, "vit_tiny_patch16_224", img_size=SIDE, patch_size=8, depth=2, drop_path_rate=0.1
    ),
    "timm swin_tiny": _make(_timm, "swin_tiny_patch4_window7_224", img_size=56, side=56, depths=(1, 1, 1, 1)),
    "timm mixer_s32": _make(_timm, "mixer_s32_224", img_size=64, side=64),
    "timm levit_128s": _make(_timm, "levit_128s", side=224),
    "timm coatnet_nano": _make(_timm, "coatnet_nano_rw_224", img_size=64, side=64),
    "timm mobilevit_xxs": _make(_timm, "mobilevit_xxs", side=64),
    "timm xcit_nano": _make(_timm, "xcit_nano_12_p16_224", img_size=SIDE, depth=2),
    "timm eva02_tiny": _make(_timm, "eva02_tiny_patch14_224", img_size=28, side=28, depth=2),
    "timm resnest14d": _make(_timm, "resnest14d"),
    "GPT-2": _make(_causal, "GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=32),
    "Llama": _make(_causal, "Llama", **_GROUPED),
    "Qwen2": _make(_causal, "Qwen2", **_SMALL, num_key_value_heads=2),
    "Qwen3": _make(_causal, "Qwen3", **_GROUPED),
    "Mistral": _make(_causal, "Mistral", **_GROUPED),
    "Gemma": _make(_causal, "Gemma", **_GROUPED),
    "Gemma 2": _make(_causal, "Gemma2", **_GROUPED),
    "Phi-3": _make(_causal, "Phi3", **_SMALL, num_key_value_heads=2),
    "OPT": _make(
        _causal, "OPT", hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    ),
    "Mixtral, mixture of experts": _make(_causal, "Mixtral", **_GROUPED, num_local_experts=4),
    "Mamba": _make(_causal, "Mamba", hidden_size=32, num_hidden_layers=2, state_size=8),
    "BERT": _make(_masked, "Bert"),
    "RoBERTa": _make(_masked, "Roberta"),
    "DistilBERT": _make(_masked, "DistilBert"),
    "DeBERTa v2": _make(_masked, "DebertaV2"),
    "T5": _make(_sequence, "T5"),
    "BART": _make(_sequence, "Bart"),
    "ALBERT": _make(_hugging, "AlbertForMaskedLM", _words, vocab_size=VOCABULARY, embedding_size=16, **_SMALL),
    "ELECTRA": _make(_hugging, "ElectraForMaskedLM", _words, vocab_size=VOCABULARY, embedding_size=16, **_SMALL),
    "XLNet": _make(_hugging, "XLNetLMHeadModel", _words, vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4),
    "Longformer": _make(_hugging, "LongformerForMaskedLM", _words, vocab_size=VOCABULARY, attention_window=4, **_SMALL),
    "Perceiver": _make(
        _hugging,
        "PerceiverForMaskedLM",
        _words,
        vocab_size=VOCABULARY,
        d_model=32,
        d_latents=32,
        num_latents=8,
        max_position_embeddings=16,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        qk_channels=32,
        v_channels=32,
    ),
    "GPT-NeoX": _make(_causal, "GPTNeoX", **_SMALL),
    "Falcon": _make(_causal, "Falcon", hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "Qwen3, mixture of experts": _make(
        _causal, "Qwen3Moe", **_GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "DeepSeek V3": _make(
        _causal,
        "DeepseekV3",
        **{**_SMALL, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8},
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "gpt-oss": _make(_causal, "GptOss", **_GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "Mamba 2": _make(
        _causal,
        "Mamba2",
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
    ),
    "RWKV": _make(_causal, "Rwkv", hidden_size=32, num_hidden_layers=2, attention_hidden_size=32),
    "Jamba": _make(
        _causal,
        "Jamba",
        **{**_SMALL, "num_key_value_heads": 2, "num_experts": 2, "use_mamba_kernels": False},
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=4,
    ),
    "Wav2Vec2, CTC": _make(_hugging, "Wav2Vec2ForCTC", _speech, vocab_size=VOCABULARY, pad_token_id=0, **_SOUND),
    "Swin v2": _make(
        _hugging,
        "Swinv2ForImageClassification",
        _pictures,
        image_size=SIDE,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
        window_size=4,
        num_labels=LABELS,
    ),
    "BEiT": _make(_hugging, "BeitForImageClassification", _pictures, num_labels=LABELS, **_PATCHES, **_SMALL),
    "DINOv2": _make(
        _hugging,
        "Dinov2ForImageClassification",
        _pictures,
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": LABELS, **_PATCHES},
    ),
    "VideoMAE": _make(
        _hugging, "VideoMAEForVideoClassification", _films, num_frames=4, num_labels=LABELS, **_PATCHES, **_SMALL
    ),
    "SigLIP": _make(
        _hugging,
        "SiglipModel",
        _pairs,
        text_config={"vocab_size": VOCABULARY, "max_position_embeddings": 16, **_SMALL},
        vision_config={**_PATCHES, **_SMALL},
    ),
    "PatchTST": _make(
        _hugging,
        "PatchTSTForPrediction",
        _series,
        num_input_channels=2,
        context_length=32,
        prediction_length=8,
        patch_length=8,
        patch_stride=8,
        d_model=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
    ),
    "ViT of transformers": _hugging_vit,
    "CLIP": _clip,
    "Whisper": _whisper,
    "Wav2Vec2": _wav2vec2,
    "DETR": _detection,
    "SegFormer": _segformer,
    "LR-ASPP of torchvision": _segmentation,
    "UNet of diffusers": _make(_diffusion, "unet"),
    "DiT of diffusers": _make(_diffusion, "dit"),
    "GCN of torch_geometric": _make(_graphs, "GCN"),
    "GAT of torch_geometric": _make(_graphs, "GAT"),
    "GraphSAGE of torch_geometric": _make(_graphs, "SAGE"),
    "RNN": _make(_recurrent, nn.RNN),
    "LSTM": _make(_recurrent, nn.LSTM),
    "GRU": _make(_recurrent, nn.GRU),
    "Transformer of torch": _translator,
    "DLRM": _recommender,
    "variational autoencoder of torch.distributions": _autoencoder,
    "LoRA of peft on Llama": _adapters,
}


def task(name: str) -> Task:
    """A fresh model of the zoo."""
    with without_operators():
        import torchvision  # noqa: F401  what timm and transformers import
    torch.manual_seed(0)
    return ZOO[name]()
