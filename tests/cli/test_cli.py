"""The command line, on the shipped model and on a folder."""

import re
import shlex
import subprocess
import sys

import pytest
from torch.nn.modules.module import register_module_forward_pre_hook

from bridge import TransformerBridge
from bridge.cli.main import _parser, main
from bridge.version import __version__
from tests.conftest import tiny


def test_demo(capsys):
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert "Prediction: ' Mary', then " in out
    assert "logit(Mary) - logit(John)" in out
    assert "Logit lens at the last position" in out
    assert "Ablating the heads that contribute most" in out
    over = out[out.index("Over 100") :].splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in over[4:11]}
    answer, repeated, _, _ = map(float, [one.strip("%") for one in rows["L2H3"]])
    assert answer < 1 < -repeated  # it lowers the name that it attends to
    none, strongest, five = (float(rows[name][-2]) for name in ("none", "L0H0", "all"))
    assert rows["none"][-1] == "100%" and list(rows)[1] == "L0H0"
    assert five < strongest < none - 1  # the heads really carry it, and together they carry more


def test_demo_on_a_prompt(capsys):
    assert main(["demo", "--prompt", "The capital of"]) == 0
    assert "Prompt: 'The capital of'" in capsys.readouterr().out


@pytest.mark.parametrize("report", [False, True])
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ("Barack Obama was born in", "does not know 'Barack', ' Obama'.*' born'"),
    ],
)
def test_demo_refuses_what_the_model_cannot_read(capsys, tmp_path, prompt, message, report):
    page = tmp_path / "page.html"
    assert main(["demo", "--prompt", prompt, *(["--report", str(page)] if report else [])]) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err)
    assert not captured.out
    assert not page.exists()


def test_hooks_lists_names_shapes_and_aliases(capsys, tmp_path):
    tiny("gpt_neox").save_pretrained(tmp_path)
    assert main(["hooks", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    row = next(line.split() for line in out.splitlines() if "blocks.2.attn.hook_q " in line)
    assert row == [
        "blocks.2.attn.hook_q",
        "[batch,",
        "pos,",
        "4,",
        "8]",
        "standard",
        "blocks.2.attn.q.hook_out",
    ]


def test_verify_prints_a_table_and_says_so_by_its_status(capsys, tmp_path, monkeypatch):
    tiny("llama").save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert ": verified" in out
    assert out.count("  ok  ") == len(out.splitlines()) - 1 > 20


def test_verify_is_quick_where_it_is_asked(capsys):
    assert main(["verify", "embedded"]) == 0
    full = capsys.readouterr().out
    assert main(["verify", "embedded", "--quick"]) == 0
    quick = capsys.readouterr().out
    assert ": verified" in quick and len(quick.splitlines()) < len(full.splitlines())


def test_usage(capsys):
    with pytest.raises(SystemExit):
        main(["dmeo"])
    assert "there is no command 'dmeo': did you mean 'demo'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["frobnicate"])
    assert "invalid choice: 'frobnicate'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["ask", "embedded", " "], "the prompt is empty"),
        (["demo", "--report", "page.pdf"], "must end in .html"),
        (["hooks", "/nowhere/gpt2"], "/nowhere/gpt2: there is no such folder"),
        (["generate", "embedded", "Mary", "--tp"], "start them with torchrun"),
        (["ask", "embeded", "Mary"], "there is no model 'embeded' here: did you mean 'embedded'?"),
        (["ask", "embedded", "Mary", "--against", ""], "--against is empty"),
        (["generate", "embedded", "Mary", "--interventions", "no"], "there is no file no"),
        (["harvest", "embedded", "no.txt", "--points", "x", "--out", "y"], "matches 'no.txt'"),
    ],
)
def test_arguments_are_checked_before_torch_is_imported(command, message):
    _fails_without_torch(command, message)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["ask", "embedded", "Mary", "--reprot", "x"], "--reprot: did you mean --report?"),
        (["harvest", "--batchsize=3"], "--batchsize: did you mean --batch-size?"),
        (
            ["generate", "embedded", "Mary", "--max-new-tokens", "-3"],
            "-3 is no whole number from 1",
        ),
        (["harvest", "--context-size", "1"], "1 is no whole number from 2 on"),
        (["harvest", "--workers", "two"], "two is no whole number from 1 on"),
    ],
)
def test_options_are_checked_before_torch_is_imported(command, message):
    _fails_without_torch(command, message)


def _fails_without_torch(command, message):
    code = (
        "import sys; from bridge.cli.main import main\n"
        f"try: status = main({command})\n"
        "except SystemExit as exit: status = exit.code\n"
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 2 and message in run.stderr, run.stderr


def test_demo_as_a_page(capsys, tmp_path):
    page = tmp_path / "story.html"
    assert main(["demo", "--report", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert text.count('class="bridge-picture"') == 6
    assert "It answers &#x27; Mary&#x27; with probability 0.99" in text
    assert main(["demo", "--report", str(page), "--prompt", "The capital of France is"]) == 0
    assert page.read_text(encoding="utf-8").count('class="bridge-picture"') == 3


def test_a_page_must_have_a_place(capsys, tmp_path):
    assert main(["demo", "--report", "story.pdf"]) == 2
    assert "must end in .html" in capsys.readouterr().err
    assert main(["demo", "--report", str(tmp_path / "nowhere" / "story.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["hooks"], ["verify"], ["demo", "--model"]])
@pytest.mark.parametrize(
    "model", ["gpt2-folder", "./gpt2-folder", "/nowhere/gpt2", "me/gpt2-folder"]
)
def test_a_model_that_is_not_there_is_said_in_one_line(capsys, command, model):
    assert main([*command, model]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        captured.err.startswith(f"{model}: there is no such folder")
        and captured.err.count("\n") == 1
    )


def test_a_reader_that_leaves_is_no_error():
    """`python -m bridge hooks embedded | head -1`"""
    command = [sys.executable, "-m", "bridge", "hooks", "embedded"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=0
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == 141


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (
        ended.value.code == 0 and capsys.readouterr().out == f"transformer-bridge {__version__}\n"
    )


@pytest.mark.parametrize(
    "command", ["ask", "demo", "hooks", "verify", "declare", "generate", "harvest", "export"]
)
def test_every_help_has_an_example_that_is_a_command_line(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    example = shown[shown.index("example:") :].splitlines()[1].split("python -m bridge ")[1]
    assert _parser()[0].parse_args(shlex.split(example)).command == command
    assert "``" not in shown


def test_the_exit_statuses_are_documented(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown[shown.index("exit status:") :].splitlines()[1:]] == [
        "0",
        "1",
        "2",
        "130",
        "141",
    ]
    assert "``" not in shown


def test_ask_against_another_answer(capsys, tmp_path):
    prompt = "The capital of France is"
    assert main(["ask", "embedded", prompt, "--against", " Rome"]) == 0
    out = capsys.readouterr().out
    assert "Direct contribution of each head to logit(Paris) - logit(Rome)" in out
    bridge = TransformerBridge.boot_embedded()
    logits = bridge(prompt)[0, -1]
    paris, rome = (logits[bridge.to_single_token(text)] for text in (" Paris", " Rome"))
    assert f"logit(Paris) - logit(Rome): {paris - rome:+.2f} (probabilities 0.997" in out
    assert f"the difference is {paris - rome:+.2f} without" in out
    page = tmp_path / "page.html"
    command = ["ask", "embedded", prompt, "--against", " Rome", "--report", str(page)]
    assert main(command) == 0
    assert "logit(·Paris) - logit(·Rome)" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("against", "message"),
    [(" Paris", "is what the model says itself"), (" New York", "is 2 tokens, not one|no token")],
)
def test_an_answer_that_cannot_be_compared(capsys, against, message):
    assert main(["ask", "embedded", "The capital of France is", "--against", against]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_warning_is_one_line_without_our_code():
    command = [sys.executable, "-m", "bridge", "ask", "embedded", "The capital of France is"]
    run = subprocess.run(
        [*command, "--against", "Rome"], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"warning: 'Rome' is the token 560; .* ' Rome', .*\n", run.stderr)


def test_ask(capsys, tmp_path):
    assert main(["ask", "embedded", "The capital of France is"]) == 0
    out = capsys.readouterr().out
    assert (
        "Prediction: ' Paris', then " in out
        and "Direct contribution of each head to logit(Paris)" in out
    )
    page = tmp_path / "page.html"
    assert main(["ask", "embedded", "The capital of France is", "--report", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "It answers &#x27; Paris&#x27; with probability" in text and "Less likely are" in text
    assert main(["ask", "embedded", " "]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_an_interrupted_command_says_what_is_kept(capsys, tmp_path):
    """Whoever waits presses Ctrl-C while a model runs."""

    def interrupted(module, args):
        raise KeyboardInterrupt

    text, out = tmp_path / "a.txt", tmp_path / "shards"
    text.write_text("Mary and John\n")
    handle = register_module_forward_pre_hook(interrupted)
    try:
        assert main(["generate", "embedded", "Mary"]) == 130
        assert capsys.readouterr().err.endswith("\ninterrupted\n")
        assert (
            main(
                [
                    "harvest",
                    "embedded",
                    str(text),
                    "--points",
                    "blocks.1.hook_resid_post",
                    "--out",
                    str(out),
                ]
            )
            == 130
        )
    finally:
        handle.remove()
    said = f"\ninterrupted: what is whole in {out} is kept, the same command goes on\n"
    assert capsys.readouterr().err.endswith(said)


def test_a_folder_with_a_gguf_file_alone(capsys, tmp_path):
    assert main(["hooks", str(tmp_path)]) == 2
    assert "there is no model in this folder, which has no config.json\n" in capsys.readouterr().err
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    assert main(["hooks", str(tmp_path)]) == 2
    assert "it has GGUF: gguf_file='small.gguf' (--gguf-file) loads it" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "small.gguf")]) == 2
    assert (
        f"is a file: give its folder, {tmp_path}, and gguf_file='small.gguf'"
        in capsys.readouterr().err
    )


def test_the_advice_for_a_harvest_is_a_name_that_the_command_line_takes(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("Mary and John\n")
    command = [
        "harvest",
        "embedded",
        str(tmp_path / "a.txt"),
        "--out",
        str(tmp_path / "out"),
        "--points",
    ]
    assert main([*command, "hook_z"]) == 2
    said = capsys.readouterr().err
    assert "A name says the layer: blocks.0.attn.hook_z, or in Python, for all 4 layers" in said
    assert main([*command, "blocks.0.attn.hook_z", "--quiet"]) == 0
