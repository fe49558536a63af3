"""Making the tiny policy: determinism, replacement, and the shipped checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason='the tiny policy needs torch: pip install "agl-slime[local]"')
transformers = pytest.importorskip("transformers")
load = pytest.importorskip("safetensors.torch").load

from agl_slime.cli.demo import LOOKUP_POLICY, LookupDemonstrations  # noqa: E402
from agl_slime.cli.demo.warmup import SPEC_FILE, PolicySettings, make_policy, spec_of  # noqa: E402
from agl_slime.errors import ConfigError, TrainerError  # noqa: E402

QUICK = PolicySettings(target=0.0, probe_every=1, imperfect_steps=1, batch_size=2, probe_size=2)
"""One step of each phase, for tests that do not depend on its result."""


def test_the_same_seed_gives_the_same_policy_and_another_seed_replaces_it(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()

    def weights(name: str, seed: int) -> bytes:
        return (make_policy(tmp_path / name, seed=seed, settings=QUICK) / "model.safetensors").read_bytes()

    first = weights("a", 1)
    assert bool((torch.random.get_rng_state() == state).all())
    assert weights("b", 1) == first
    assert weights("a", 2) != first
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_a_policy_that_cannot_be_made_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds no tiny policy"):
        make_policy(tmp_path, settings=QUICK)
    slow = PolicySettings(max_steps=2, probe_every=1, batch_size=2, probe_size=4)
    with pytest.raises(TrainerError, match="the warm-up's probe is at"):
        make_policy(tmp_path / "p", settings=slow)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_shipped_policy_is_of_todays_demonstrations_and_needs_no_torch() -> None:
    """Fails when the demonstrations or settings have changed: run agl-slime demo-policy."""
    program = "import sys; from agl_slime.cli.demo import LOOKUP_POLICY; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
    files = {path.name: path.read_bytes() for path in LOOKUP_POLICY.iterdir()}
    assert json.loads(files[SPEC_FILE])["spec"] == spec_of(0, LookupDemonstrations(), PolicySettings())
    assert sum(map(len, files.values())) < 600_000
    # transformers 4 reads another field than transformers 5
    config = json.loads(files["config.json"])
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1000.0


@pytest.mark.slow
def test_the_script_gives_the_shipped_policy(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agl_slime.cli.main", "demo-policy", str(tmp_path / "p")]
    subprocess.run(command, timeout=300, check=True)
    directories = (tmp_path / "p", LOOKUP_POLICY)
    made, shipped = (json.loads((directory / SPEC_FILE).read_text()) for directory in directories)
    assert made["spec"] == shipped["spec"]
    assert made["warmup"]["clean_probe"] >= 0.9
    if made["made_with"] == shipped["made_with"]:  # sums round differently elsewhere
        files = [{path.name: path.read_bytes() for path in directory.iterdir()} for directory in directories]
        weights = [load(contents.pop("model.safetensors")) for contents in files]
        assert files[0] == files[1]
        assert weights[0].keys() == weights[1].keys()
        for name, tensor in weights[0].items():  # processors of one capability round differently, too, by 4e-5
            torch.testing.assert_close(tensor, weights[1][name], atol=5e-4, rtol=0.0)


def test_it_is_an_ordinary_checkpoint(policy_dir: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(policy_dir)
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy_dir)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert sum(parameter.numel() for parameter in model.parameters()) == 128_128
    assert model.config.vocab_size == len(tokenizer) == 460
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert json.loads((policy_dir / SPEC_FILE).read_text())["warmup"]["clean_probe"] >= 0.9
