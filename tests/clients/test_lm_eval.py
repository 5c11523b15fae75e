"""lm-evaluation-harness takes the model of a bridge; inside `bridge.hooks`, that model has
interventions.
"""

import json

import lm_eval
import pytest
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from bridge import TransformerBridge
from bridge.embedded import prompts

TASK = """
task: names
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: choices
doc_to_target: label
metric_list:
  - metric: acc
"""


@pytest.fixture
def accuracy(tmp_path):
    """How many of the prompts of indirect objects it continues with the right name."""
    file = tmp_path / "names.jsonl"
    rows = [
        {"text": one.text, "choices": [one.answer, one.wrong], "label": 0}
        for one in prompts("ioi", 24)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "names.yaml").write_text(TASK.format(file=file))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def of(bridge):
        model = HFLM(
            pretrained=bridge.original_model, tokenizer=bridge.tokenizer, batch_size=8, device="cpu"
        )
        found = lm_eval.simple_evaluate(
            model, tasks=["names"], task_manager=manager, bootstrap_iters=0
        )
        return found["results"]["names"]["acc,none"], len(found["samples"]["names"])

    return of


def test_interventions_act_on_what_it_measures(accuracy):
    bridge = TransformerBridge.boot_embedded()
    right, count = accuracy(bridge)
    assert right > 0.8
    assert count == 24
    with bridge.hooks([(f"blocks.{i}.attn.hook_z", lambda z, hook: z * 0) for i in range(4)]):
        assert accuracy(bridge)[0] < right - 0.2
    assert accuracy(bridge)[0] == right
