"""What tiny models of images and text need besides: sizes that fit each other, and images (and
sound) made by hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _sections(*sections: int) -> dict[str, Any]:
    """Rotary embeddings whose columns belong to time, height and width."""
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": list(sections),
        }
    }


_VOCABULARY = {"<image>": 5, "IMGIMGAZ": 6, "IMGIMGBZ": 7}
#: What a configuration class needs besides, by its model type.
OWN: dict[str, dict[str, Any]] = {
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 98},
    "blip_vision_model": {"image_size": 64},
    "blip_2_vision_model": {"image_size": 28},
    "instructblip_vision_model": {"image_size": 28},
    "instructblipvideo_vision_model": {"image_size": 28},
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "vit": {"image_size": 64},
    "deit": {"image_size": 64},
    "beit": {"image_size": 64},
    "data2vec-vision": {"image_size": 64},
    "dinov2": {"image_size": 56},
    "dinov2_with_registers": {"image_size": 56},
    "dinov3_vit": {"image_size": 64},
    "ijepa": {"image_size": 56},
    "vit_msn": {"image_size": 64},
    "vit_mae": {"image_size": 64},
    "pixio": {"image_size": 64},
    "yolos": {"image_size": [64, 64]},
    "blip-2": {"image_token_index": 5, "num_query_tokens": 3},
    "chameleon": {"vocabulary_map": _VOCABULARY},
    "cosmos3_edge_text": _sections(1, 1, 2),
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16], **_sections(1, 1, 2)},
    "ernie4_5_vl_moe_vision": {"hidden_size": 32, "depth": 2},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "glm5_next_text": {"index_topk": 16, "qk_rope_head_dim": 0, **_sections(1, 1, 2)},
    "instructblip": {"image_token_index": 5, "num_query_tokens": 3},
    "instructblipvideo": {"video_token_index": 5, "num_query_tokens": 3},
    "hubert": {
        "conv_dim": [16] * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
    },
    "wav2vec2": {
        "conv_dim": [16] * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
    },
    "inkling2_vision": {"text_hidden_size": 32},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "granite_docling_vision": {"out_hidden_size": 32},
    "emu3": {
        "vocabulary_map": {
            str(token): number for number, token in enumerate(("<image>", "a", "b"), 5)
        }
    },
    "gemma3": {"image_token_index": 5, "mm_tokens_per_image": 49},
    "llava": {"image_token_index": 5},
    "muse_spark_audio": {
        "num_hidden_layers": 4,
        "hidden_sizes": [8, 16, 24, 32],
        "depths": [1, 1, 1, 1],
        "out_hidden_size": 32,
    },
    "radio": {"video_temporal_patch_size": 2},
    "mllama": {"image_token_index": 5},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "mllama_vision_model": {
        "image_size": 28,
        "num_global_layers": 1,
        "intermediate_layers_indices": [0],
        "vision_output_dim": 64,
    },
    "qwen2_audio": {"audio_token_index": 5},
    "qwen2_vl": {
        "image_token_id": 5,
        "video_token_id": 6,
        "vision_start_token_id": 7,
        "vision_end_token_id": 8,
    },
    "florence_vision": {"num_heads": [4, 4, 4, 4]},
    "glm4v_text": _sections(1, 1, 2),
    "glm4v_moe_text": _sections(1, 1, 0),
    "glm_ocr_text": _sections(1, 1, 2),
    "hunyuan_vl_text": _sections(1, 1, 2),
    "kosmos-2": {"latent_query_num": 3},
    "kosmos_2_text_model": {"layers": 2, "embed_dim": 32, "attention_heads": 4},
    "kosmos_2_5_text_model": {"layers": 2, "embed_dim": 32, "attention_heads": 4},
    "paddleocr_vl_text": _sections(1, 1, 2),
    "pix2struct_text_model": {"hidden_size": 32},
    "pp_formulanet_vision": {
        "decoder_hidden_size": 32,
        "image_size": 160,
        "global_attn_indexes": [1],
    },
    "qwen2_vl_vision": {"embed_dim": 32, "depth": 2},
    "qwen2_vl_text": _sections(1, 1, 2),
    "qwen2_5_vl_text": _sections(1, 1, 2),
    "qwen2_5_vl_vision": {"out_hidden_size": 32},
    "qwen2_5_omni_text": _sections(1, 1, 2),
    "qwen3_vl": {
        "image_token_id": 5,
        "video_token_id": 6,
        "vision_start_token_id": 7,
        "vision_end_token_id": 8,
    },
    "qwen3_vl_text": _sections(1, 1, 2),
    "qwen3_vl_vision": {"out_hidden_size": 32, "depth": 2, "deepstack_visual_indexes": [0]},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]]},
}


def image_inputs(model_type: str) -> tuple[Tensor, dict[str, Any]]:
    """Two prompts with an image (or a sound) in each, and what else the tiny model of the type
    takes: random numbers.

    Args:
        model_type: ``gemma3``, ``llava``, ``qwen2_audio``, ``qwen2_vl`` or ``qwen3_vl``.
    """
    generator = torch.Generator().manual_seed(0)
    places = {"gemma3": 49, "llava": 49, "qwen2_audio": 32}.get(model_type, 4)
    text = torch.randint(9, 99, (2, 8), generator=generator)
    tokens = torch.cat([text[:, :3], torch.full((2, places), 5), text[:, 3:]], 1)
    if model_type == "qwen2_audio":  # 128 frames, four of which become one place
        features = torch.randn(2, 128, 128, generator=generator)
        return tokens, {
            "input_features": features,
            "feature_attention_mask": torch.ones(2, 128, dtype=torch.long),
        }
    if model_type.startswith(
        "qwen"
    ):  # patches in rows; each image is 4 by 4 of them, 4 of which become one place
        side = 14 if model_type == "qwen2_vl" else 16
        return tokens, {
            "pixel_values": torch.randn(32, 3 * 2 * side**2, generator=generator),
            "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
            "mm_token_type_ids": (tokens == 5).int(),
        }
    return tokens, {"pixel_values": torch.randn(2, 3, 224, 224, generator=generator)}
