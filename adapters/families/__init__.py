"""The families that are declared here, one file each, and the classes of models that each is for."""

from collections.abc import Mapping
from types import MappingProxyType

#: For each file the functions that declare, and the names of the classes that each is for, with all their subclasses. A
#: file is imported when a model of one of these classes is wrapped.
CLASSES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "apertus": {"apertus": ("ApertusPreTrainedModel",)},
        "bart": {
            "bart": ("BartPreTrainedModel", "PLBartPreTrainedModel"),
            "blenderbot_small": ("BlenderbotSmallPreTrainedModel",),
            "marian": ("MarianPreTrainedModel",),
            "mbart": ("MBartPreTrainedModel",),
            "m2m_100": ("BlenderbotPreTrainedModel", "M2M100PreTrainedModel"),
            "pegasus": ("PegasusPreTrainedModel",),
        },
        "bert": {"bert": ("BertPreTrainedModel",)},
        "bloom": {"bloom": ("BloomPreTrainedModel",)},
        "codegen": {"codegen": ("CodeGenPreTrainedModel",)},
        "cohere": {
            "cohere": ("Cohere2PreTrainedModel", "CoherePreTrainedModel"),
            "compass": ("CohereCompassForCausalLM", "CohereCompassTextModel"),
        },
        "dbrx": {"dbrx": ("DbrxPreTrainedModel",)},
        "deepseek": {
            "deepseek_v2": ("DeepseekV2PreTrainedModel",),
            "deepseek_v3": ("DeepseekV3PreTrainedModel",),
            "glm4_moe_lite": ("Glm4MoeLitePreTrainedModel",),
            "youtu": ("YoutuPreTrainedModel",),
            "minicpm3": ("MiniCPM3PreTrainedModel",),
        },
        "dots": {
            "dots1": ("Dots1PreTrainedModel",),
            "solar_open": ("SolarOpenPreTrainedModel",),
            "minimax_m2": ("MiniMaxM2PreTrainedModel",),
            "aria_text": ("AriaTextPreTrainedModel",),
            "mellum": ("MellumPreTrainedModel",),
        },
        "exaone": {
            "exaone4": ("Exaone4PreTrainedModel",),
            "exaone_moe": ("ExaoneMoePreTrainedModel",),
        },
        "falcon": {"falcon": ("FalconPreTrainedModel",)},
        "flint": {"flint": ("FlintPreTrainedModel",)},
        "gemma": {
            "gemma": ("GemmaPreTrainedModel",),
            "gemma2": ("Gemma2PreTrainedModel",),
            "gemma3": ("Gemma3PreTrainedModel",),
            "vaultgemma": ("VaultGemmaPreTrainedModel",),
        },
        "glm": {
            "glm": ("GlmPreTrainedModel",),
            "glm4": ("Glm4PreTrainedModel", "Glm4vTextModel", "GlmOcrTextModel"),
            "glm4_moe": ("Glm4MoePreTrainedModel", "Glm4vMoeTextModel"),
        },
        "gpt2": {"gpt2": ("GPT2PreTrainedModel",)},
        "gpt_bigcode": {"gpt_bigcode": ("GPTBigCodePreTrainedModel",)},
        "gpt_neo": {"gpt_neo": ("GPTNeoPreTrainedModel",)},
        "gpt_neox": {"gpt_neox": ("GPTNeoXPreTrainedModel",)},
        "gpt_oss": {"gpt_oss": ("GptOssPreTrainedModel",)},
        "gptj": {"gptj": ("GPTJPreTrainedModel",)},
        "granite": {
            "granite": ("GraniteDoclingTextModel", "GranitePreTrainedModel"),
            "hyperclovax": ("HyperCLOVAXPreTrainedModel",),
            "granite_moe": (
                "GraniteMoePreTrainedModel", "GraniteMoeSWAPreTrainedModel",
                "GraniteMoeSharedPreTrainedModel",
            ),
            "granite_swa": ("GraniteSWAPreTrainedModel",),
        },
        "helium": {
            "helium": ("Ernie4_5PreTrainedModel", "HeliumPreTrainedModel"),
            "ernie4_5_moe": ("Ernie4_5_MoePreTrainedModel",),
        },
        "hunyuan": {
            "hunyuan": ("HunYuanDenseV1PreTrainedModel", "HunYuanVLTextModel"),
            "hunyuan_moe": ("HunYuanMoEV1PreTrainedModel",),
            "hy_v3": ("HYV3PreTrainedModel",),
        },
        "image_text": {
            "with_language_model": (
                "AriaForConditionalGeneration", "AudioFlamingo3ForConditionalGeneration",
                "CohereCompassForConditionalGeneration", "DeepseekVLForConditionalGeneration",
                "DeepseekVLHybridForConditionalGeneration", "Exaone4_5_ForConditionalGeneration",
                "Glm46VForConditionalGeneration", "Glm4vForConditionalGeneration",
                "Glm4vMoeForConditionalGeneration", "GlmAsrForConditionalGeneration",
                "GlmOcrForConditionalGeneration", "GotOcr2ForConditionalGeneration",
                "HunYuanVLForConditionalGeneration", "HyperCLOVAXVisionV2ForConditionalGeneration",
                "InternVLForConditionalGeneration", "JanusForConditionalGeneration",
                "Kimi_K25ForConditionalGeneration", "LightOnOcrForConditionalGeneration",
                "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration",
                "LlavaNextVideoForConditionalGeneration", "LlavaOnevisionForConditionalGeneration",
                "Mistral3ForConditionalGeneration", "MossTranscribeDiarizeForConditionalGeneration",
                "MusicFlamingoForConditionalGeneration", "QianfanOCRForConditionalGeneration",
                "Qwen2AudioForConditionalGeneration", "Qwen2VLForConditionalGeneration",
                "Qwen2_5_VLForConditionalGeneration", "Qwen3ASRForConditionalGeneration",
                "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
                "VibeVoiceAsrForConditionalGeneration", "VideoLlama3ForConditionalGeneration",
                "VideoLlavaForConditionalGeneration", "VipLlavaForConditionalGeneration",
                "VoxtralForConditionalGeneration",
            ),
            "with_text_model": (
                "Emu3ForConditionalGeneration", "GraniteDoclingForConditionalGeneration",
                "Idefics2ForConditionalGeneration", "Idefics3ForConditionalGeneration",
                "SmolVLMForConditionalGeneration",
            ),
            "without_factor": (
                "AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration",
                "GraniteSpeechForConditionalGeneration", "GraniteSpeechPlusForConditionalGeneration",
            ),
        },
        "kolibri": {
            "kolibri1": ("Kolibri1PreTrainedModel",),
            "laguna": ("LagunaPreTrainedModel",),
            "afmoe": ("AfmoePreTrainedModel",),
        },
        "llama": {
            "llama": (
                "CwmPreTrainedModel", "Emu3ForCausalLM", "Emu3TextModel", "LlamaPreTrainedModel",
                "Ministral3PreTrainedModel", "MinistralPreTrainedModel", "MistralPreTrainedModel",
                "SeedOssPreTrainedModel", "SmolLM3PreTrainedModel",
            ),
            "arcee": ("ArceePreTrainedModel",),
        },
        "mixtral": {"mixtral": ("MixtralPreTrainedModel",)},
        "modernbert_decoder": {"modernbert_decoder": ("ModernBertDecoderPreTrainedModel",)},
        "moshi": {"moshi": ("MoshiForCausalLM", "MoshiModel")},
        "mpt": {"mpt": ("MptPreTrainedModel",)},
        "native": {"native": ("NativeModel",)},
        "olmo": {
            "olmo": ("OlmoPreTrainedModel",),
            "olmo2": ("Olmo2PreTrainedModel", "Olmo3PreTrainedModel"),
            "olmoe": ("OlmoePreTrainedModel",),
            "flex_olmo": ("FlexOlmoPreTrainedModel",),
        },
        "openai_gpt": {"openai_gpt": ("OpenAIGPTPreTrainedModel",)},
        "opt": {"opt": ("OPTPreTrainedModel",)},
        "persimmon": {
            "persimmon": ("PersimmonPreTrainedModel",),
            "fuyu": ("FuyuPreTrainedModel",),
        },
        "phi": {"phi": ("PhiPreTrainedModel",)},
        "phi3": {"phi3": ("Phi3PreTrainedModel", "Phi4MultimodalForCausalLM", "Phi4MultimodalModel")},
        "qwen": {
            "qwen2": ("Qwen2PreTrainedModel", "Qwen2VLTextModel", "Qwen2_5_VLTextModel"),
            "qwen3": ("Qwen3PreTrainedModel", "Qwen3VLTextModel"),
        },
        "qwen_moe": {
            "qwen2_moe": ("Qwen2MoePreTrainedModel",),
            "qwen3_moe": ("Qwen3MoePreTrainedModel",),
            "qwen3_vl_moe": ("Qwen3VLMoeTextModel",),
        },
        "stablelm": {"stablelm": ("StableLmPreTrainedModel",)},
        "starcoder2": {
            "starcoder2": ("Starcoder2PreTrainedModel",),
            "jais2": ("Jais2PreTrainedModel",),
            "nemotron": ("NemotronPreTrainedModel",),
        },
        "t5": {
            "t5": ("T5PreTrainedModel",),
            "mt5": ("MT5PreTrainedModel",),
        },
        "whisper": {
            "whisper": ("WhisperPreTrainedModel",),
            "speech_to_text": ("Speech2TextPreTrainedModel",),
        },
        "xglm": {
            "xglm": ("XGLMPreTrainedModel",),
            "biogpt": ("BioGptPreTrainedModel",),
        },
    }
)  # fmt: skip
