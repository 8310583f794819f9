"""Fixtures for all tests.

Triton's kernels run in Triton's interpreter where there is no GPU, and in forked processes, which have none.
"""

import functools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import other_machines
import pytest
from source_tree import ROOT
from torch.utils import collect_env

if not Path("/dev/nvidiactl").exists() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    import interpreted  # noqa: F401

# told to use plain instructions, torch still asks oneDNN for matrix instructions (AMX), and fails where there are any
if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "SSE41")

_ALONE = SimpleNamespace(_idlist=())

# a busy or slow machine is no failure
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

if os.environ.get("SBEVAL_TEST_MEMORY") == "shifted":  # a row of tests/measures/machines.py
    other_machines.shift_weights()

# processes that tests start as `forkserver` have these from the first of them on, which takes seconds
multiprocessing.set_forkserver_preload(["sbeval.model_adapters.lm", "sbeval.training.train"])

# a shell that starts the tests in the background, or nohup, has them, and every process they start, ignore a signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)  # before pytest reads `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `exhaustive` what `make test` leaves out of a product of several parametrisations of one test.

    Few combinations stay, which together have each value of each parametrisation; the first of those with the most
    values that no earlier one has.
    """
    products: dict[str, list[tuple[pytest.Function, set[tuple[int, str]]]]] = {}
    for item in items:
        whole = item.get_closest_marker("exhaustive") or item.get_closest_marker("every_combination")
        if (
            isinstance(item, pytest.Function)
            and not whole
            and len(values := getattr(item, "callspec", _ALONE)._idlist) > 1
        ):
            products.setdefault(item.nodeid.partition("[")[0], []).append((item, {*enumerate(values)}))
    for combinations in products.values():
        missing = set.union(*(values for _, values in combinations))
        while missing:
            chosen = max(combinations, key=lambda each: len(each[1] & missing))
            combinations.remove(chosen)
            missing -= chosen[1]
        for item, _ in combinations:
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(autouse=True)
def logs_as_in_a_fresh_process() -> None:
    """Undoes what commands that earlier tests ran in this process have set: lm-eval's, and `sbeval launch`."""
    logging.disable(logging.NOTSET)
    harness = logging.getLogger("lm_eval")
    harness.setLevel(logging.NOTSET)
    harness.propagate = True


@pytest.fixture(autouse=True, scope="session")
def environment_asked_once() -> None:
    """lm-eval describes this machine, with twelve programs, at the end of each evaluation; here once for all."""
    collect_env.get_pretty_env_info = functools.cache(collect_env.get_pretty_env_info)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as a wheel, built from the checkout with the build tools at hand."""
    folder = tmp_path_factory.mktemp("wheel")
    build = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    config = f"import os; os.environ['DIST_EXTRA_CONFIG'] = {str(folder / 'extra.cfg')!r}; "
    (folder / "extra.cfg").write_text(f"[build]\nbuild_base = {folder / 'build'}\n[egg_info]\negg_base = {folder}\n")
    subprocess.run([sys.executable, "-c", config + build, folder], cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def wheel_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a virtual environment with the wheel in it, and this environment's other packages beside it."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)
    # plain paths: the .pth files in those folders, an editable sbeval's among them, are not read
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site_packages / "others.pth").write_text("\n".join(others))
    python = folder / "bin" / "python"
    script = python.with_name("lm_eval")
    script.write_text(f"#!{python}\nimport sys\nfrom lm_eval.__main__ import cli_evaluate\nsys.exit(cli_evaluate())\n")
    script.chmod(0o755)
    return python
