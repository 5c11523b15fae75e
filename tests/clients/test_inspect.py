"""Inspect (inspect_ai) takes a bridge by a provider of its own; inside `bridge.hooks`, that model
has interventions.
"""

import inspect_ai
import pytest
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ModelAPI, ModelOutput, get_model, modelapi
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

from bridge import TransformerBridge
from bridge.embedded import MODEL_DIR, prompts


@modelapi(name="bridge")
class Bridge(ModelAPI):
    def __init__(self, model_name, base_url=None, api_key=None, config=None, *, bridge):
        super().__init__(model_name, base_url, api_key, [], config or GenerateConfig())
        self.bridge = bridge

    async def generate(self, input, tools, tool_choice, config):
        if tools or config.num_choices:
            raise NotImplementedError("this provider calls no tools, and gives one answer")
        prompt = "\n".join(message.text for message in input)
        options = {
            "do_sample": bool(config.temperature),
            "temperature": config.temperature,
            "top_p": config.top_p,
        }
        tokens = self.bridge.generate(
            prompt,
            max_new_tokens=config.max_tokens or 16,
            return_type="tokens",
            verbose=False,
            **{key: value for key, value in options.items() if value is not None},
        )
        new = tokens[0, self.bridge.to_tokens(prompt).shape[1] :]
        return ModelOutput.from_content(self.model_name, self.bridge.to_string(new))


@pytest.fixture
def accuracy(tmp_path):
    """How many of the prompts of indirect objects it continues with the right name."""
    samples = [Sample(input=one.text, target=one.answer.strip()) for one in prompts("ioi", 24)]
    task = inspect_ai.Task(
        samples,
        solver=generate(),
        scorer=includes(),
        config=GenerateConfig(max_tokens=1, temperature=0),
    )

    def of(model):
        (log,) = inspect_ai.eval(
            task, model=model, log_dir=str(tmp_path), display="none", max_samples=4
        )
        assert log.status == "success", log.error
        assert log.results.scores[0].scored_samples == 24
        return log.results.scores[0].metrics["accuracy"].value

    return of


ABLATION = [(f"blocks.{i}.attn.hook_z", lambda z, hook: z * 0) for i in range(4)]


def test_interventions_act_on_what_it_measures(accuracy):
    bridge = TransformerBridge.boot_embedded()
    model = get_model("bridge/embedded", bridge=bridge, memoize=False)
    right = accuracy(model)
    assert right > 0.8
    with bridge.hooks(ABLATION):
        assert accuracy(model) < right - 0.2
    assert accuracy(model) == right


def test_what_its_own_provider_loaded_takes_added_hooks(accuracy):
    model = get_model(
        "hf/embedded",
        model_path=str(MODEL_DIR),
        device="cpu",
        do_sample=False,
        memoize=False,
        use_chat_template=False,
    )
    bridge = TransformerBridge(model.api.model, model.api.tokenizer)
    right = accuracy(model)  # it writes "user:" before a prompt, and no BOS
    for name, hook in ABLATION:
        bridge.add_hook(name, hook)
    assert accuracy(model) < right - 0.2
    bridge.reset_hooks()
    assert accuracy(model) == right
