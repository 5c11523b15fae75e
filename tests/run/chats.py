"""Chat templates of twelve families, and small tokenizers that know their special tokens.

The templates are written after the public ones, without tools, and render the same text. The
tokenizers are trained on the chats of the tests, byte by byte, so that a token may have a part of a
character, or characters of a message and of the template.
"""

import functools
import re
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "chat_templates"
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir())}
#: Templates in which roles must alternate.
ALTERNATING = ("gemma_3", "mistral")
TEXT = "The train is late. Is the bus here? It is 3.14 km away!\n\nSo we walk, e.g. by the river."
SPECIAL = re.compile(
    r"<\|[^'|]*\|>|<｜[^｜]*｜>|\[/?[A-Z_]+\]|</?(?:start|end)_of_\w+>|<sop>|\[gMASK\]"
)


def tokenizer_of(template, free=False):
    """Return a tokenizer for a template: of merged bytes; `free`: whose tokens may have any
    characters.
    """
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_trained(template, free))
    tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", "<|im_end|>"
    tokenizer.chat_template = template
    return tokenizer


@functools.cache
def _trained(template, free):
    special = ["<|begin_of_text|>", "<|im_end|>", *dict.fromkeys(SPECIAL.findall(template))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not free)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*dict.fromkeys(special)], initial_alphabet=alphabet
    )
    # Merges of a message's characters with those around it, as `>` with a letter.
    texts = [TEXT, "user\n\nThe .\n\n\n late!\nassistant", template] * 4
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
