"""What each extra is for, as code that needs it and none of the others, run in an empty folder."""

from __future__ import annotations

BRIDGE = "from bridge import TransformerBridge\nbridge = TransformerBridge.boot_embedded()\n"

HARVEST = """
from bridge.harvest import Activations, harvest
harvest({model}, ['Mary and John'] * 3, hook_points=['blocks.1.hook_resid_post'], out='out', context_size=4{more})
assert len(Activations('out'))
"""
RAY = "import ray\nray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)"

EXPORT = """
import torch
from transformers.exporters import ExportedModel
tokens = bridge.to_tokens('When Mary and John went to the store')
with torch.no_grad():
    for format, options in {formats}.items():
        bridge.export(tokens, format, path=format, dynamic=False)
        made = ExportedModel.from_pretrained(format, **options)(input_ids=tokens)['logits']
        torch.testing.assert_close(made, bridge(tokens), atol=1e-3, rtol=0)
"""
FORMATS: dict[str, dict[str, object]] = {
    "onnx": {},
    "executorch": {},
    "openvino": {"config": {"INFERENCE_PRECISION_HINT": "f32"}},
}

REAL = """
import gguf, sentencepiece
from transformers import LlamaTokenizer
words = ['Mary and John went to the store', 'John gave a drink to Mary'] * 9
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(words), model_prefix='tokenizer', vocab_size=30, hard_vocab_limit=False
)
tokenizer = LlamaTokenizer.from_pretrained('.')
assert tokenizer.decode(tokenizer('Mary went to John')['input_ids'], skip_special_tokens=True) == 'Mary went to John'
writer = gguf.GGUFWriter('x.gguf', 'llama')
writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.close()
assert gguf.GGUFReader('x.gguf').fields['general.architecture'].contents() == 'llama'
"""

ENGINE = """
import torch
from bridge.embedded import MODEL_DIR
from bridge.engine import Engine
if __name__ == '__main__':
    engine = Engine(MODEL_DIR, points=['blocks.1.hook_resid_post'], dtype=torch.float32)
    assert engine.offered() and engine.generate(['Mary and'], 2)
"""

PEERS = """
from transformer_lens.model_bridge import TransformerBridge as Theirs
assert Theirs.run_with_cache and Theirs.boot_transformers
"""

PROBES = """
import torch
from bridge.interventions import Probe
acts = torch.randn(40, 128, generator=torch.Generator().manual_seed(0))
labels = acts[:, 0] > 0
probe = Probe.fit(acts[:, None], labels, 'blocks.1.hook_resid_post', 'last')
assert bridge.readings(['Mary and John'], [probe])
"""

#: By the name of the extra; "" where none is installed.
USES = {
    "": (
        "bridge.generate('Mary and', max_new_tokens=2, do_sample=False, verbose=False);"
        " bridge.process_weights()\nfrom bridge.cli.main import main; assert main(['hooks',"
        " 'embedded']) == main(['demo']) == 0"
    ),
    "pictures": (
        "from bridge import pictures; lens = bridge.lens('Mary"
        " and')\npictures.logit_lens(lens.stack(), bridge.to_str_tokens('Mary and'),"
        " bridge).save('lens.svg')"
    ),
    "probes": PROBES,
    "harvest": HARVEST.format(model="bridge", more=""),
    "ray": RAY + HARVEST.format(model="'embedded'", more=", engine='ray', workers=2"),
    **{name: EXPORT.format(formats={name: options}) for name, options in FORMATS.items()},
    "export": EXPORT.format(formats=FORMATS),
    "real": REAL,
    "vllm": ENGINE,
    "peers": PEERS,
}
NOTEBOOK = (
    "import nbclient, nbformat;"
    " nbclient.NotebookClient(nbformat.read('examples/learn_induction.ipynb', 4)).execute()"
)
#: Of extras for work on the library itself: what Python is started with in its unpacked source.
COMMANDS = {
    "test": [
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        "tests/versions",
        "tests/lens",
        "tests/cache",
    ],
    "docs": [
        "-m",
        "sphinx",
        "--quiet",
        "--fail-on-warning",
        "--keep-going",
        "-b",
        "html",
        "docs",
        "build/docs",
    ],
    "notebooks": ["-c", NOTEBOOK],
    "dev": ["-m", "mypy"],
}
