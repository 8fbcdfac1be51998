"""Every check of the repository as a session; ``nox --list`` is the table of contents."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "layers", "types", "demo", "tests"]

ROOT = Path(__file__).parent
PACKAGES = ("hp-mesh", "hp-comm", "hp-cp", "hp-dsa", "hp-tune")
# installed before our packages, which ask for a floor only and so leave it as it is
TORCH = "torch==2.13.0"
EDITABLE = tuple(
    arg
    for package in PACKAGES
    for extra in ["[transformers]" if package in ("hp-cp", "hp-dsa") else ""]
    for arg in ("-e", f"packages/{package}{extra}")
)
RANKS_ENV = {
    "OMP_NUM_THREADS": "1",  # ranks share the cores; more threads each would only take turns
    "HF_HUB_OFFLINE": "1",  # no test and no demo may depend on a download
}


def group(*names: str) -> list[str]:
    """Return the requirements of dependency groups of the root ``pyproject.toml``."""
    return list(nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), *names))


def workspace(session: nox.Session) -> str:
    """Return the Python of the one environment that ``types``, ``demo`` and ``tests`` share.

    Torch is unpacked once instead of three times. It is made again when any ``pyproject.toml``,
    this file or the Python changes; source edits need nothing, the packages are editable.
    """
    home = ROOT / ".nox" / "workspace"
    python = str(home / ("Scripts" if os.name == "nt" else "bin") / "python")
    inputs = [ROOT / "pyproject.toml", ROOT / "noxfile.py"]
    inputs += [ROOT / "packages" / package / "pyproject.toml" for package in PACKAGES]
    content = b"".join(path.read_bytes() for path in inputs) + sys.version.encode()
    wanted = hashlib.sha256(content).hexdigest()
    stamp = home / "installed"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    session.run(sys.executable, "-m", "venv", "--clear", str(home), external=True)
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    session.run(*pip, TORCH, external=True)
    session.run(*pip, *group("test", "types"), *EDITABLE, external=True)
    stamp.write_text(wanted)
    return python


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and formatting."""
    session.install(*group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def layers(session: nox.Session) -> None:
    """Import-linter: which package may import which, read from the source without importing it."""
    session.install(*group("layers"))
    sources = (str(ROOT / "packages" / package / "src") for package in PACKAGES)
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(sources)})


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Mypy, strict, on the five packages."""
    session.run(workspace(session), "-m", "mypy", external=True)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Search a configuration, train a small Llama with it on 4 CPU ranks, compare with one rank."""
    args = ("benchmarks/demo.py", *session.posargs)
    session.run(workspace(session), *args, external=True, env=RANKS_ENV)


@nox.session(venv_backend="none", default=False)
def bench_overlap(session: nox.Session) -> None:
    """Measure what communication stays exposed between two hosts with a slow link; needs root."""
    args = ("benchmarks/two_hosts/run.py", *session.posargs)
    session.run(workspace(session), *args, external=True, env=RANKS_ENV)


@nox.session(venv_backend="none", default=False)
def bench_regret(session: nox.Session) -> None:
    """Measure what the picks of the tuner lose to the best, between two hosts; needs root."""
    args = ("benchmarks/two_hosts/regret.py", *session.posargs)
    session.run(workspace(session), *args, external=True, env=RANKS_ENV)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the tests of all packages and those that span packages; arguments go to pytest.

    Side by side, since ranks wait for each other much of the time; ``-n 0`` runs one at a time.
    """
    side_by_side = ("--numprocesses=auto", "--maxprocesses=4", "--dist=worksteal")
    args = ("-m", "pytest", *side_by_side, "--durations=10", *session.posargs)
    session.run(workspace(session), *args, external=True, env=RANKS_ENV)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Put small faults into hp-comm and hp-cp, one at a time: do the tests notice? Takes hours."""
    with_workspace(session, *group("mutants"))
    session.run("python", "tests/mutation/run.py", *session.posargs, env=RANKS_ENV)


@nox.session(default=False)
def bench_peers(session: nox.Session) -> None:
    """Measure ours beside DeepSpeed, yunchang, verl and others; arguments go to the benchmark."""
    session.install(TORCH)
    session.install(*group("peers-need"), *EDITABLE)
    for peer in group("peers"):
        # one that cannot be installed is a row that says so, not the end of the run
        session.install("--no-deps", peer, success_codes=range(256))
    args = ("benchmarks/peers/bench.py", *session.posargs)
    session.run("python", *args, env={**RANKS_ENV, "DS_ACCELERATOR": "cpu"})


@nox.session(default=False)
def api_docs(session: nox.Session) -> None:
    """Write the API reference from the docstrings into ``.nox/api``."""
    with_workspace(session, *group("api"))
    session.run("python", "docs/api.py", str(ROOT / ".nox" / "api"), env=RANKS_ENV)


INTERPRETED = tuple(
    f"packages/hp-comm/tests/{kind}/test_kernels_interpreter.py" for kind in ("unit", "distributed")
)
# hp-dsa's kernels are for CUDA alone
INTERPRETED_DSA = "packages/hp-dsa/tests/unit/test_ops_interpreter.py"
COMPILED_DSA = "packages/hp-dsa/tests/unit/test_ops_compile.py"


def with_workspace(session: nox.Session, *requirements: str) -> None:
    """Install into the session's own environment, and let it find the rest in the workspace.

    What is its own comes first on the path: a triton, and the numpy that goes with it.
    """
    ask = ("-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    shared = str(session.run(workspace(session), *ask, external=True, silent=True)).strip()
    session.install(*requirements)
    own = str(session.run("python", *ask, silent=True)).strip()
    Path(own, "workspace.pth").write_text(f"import site; site.addsitedir({shared!r})\n")


@nox.session(default=False)
def npu_compile(session: nox.Session) -> None:
    """Compile every kernel for Ascend without one, down to HIVM; `-- --quick`: one shape each."""
    if sys.version_info[:2] > (3, 11):
        session.skip("triton-ascend 3.2.0 has wheels up to Python 3.11: nothing was compiled")
    with_workspace(session, *group("npu-compile"))
    session.run("python", "-m", "hp_tune.kernels.check", "npu", *session.posargs)
    env = {**RANKS_ENV, "TRITON_INTERPRET": "1"}
    session.run("python", "-m", "pytest", *INTERPRETED, env=env)


@nox.session(default=False)
def cuda_compile(session: nox.Session) -> None:
    """Compile every kernel for sm_90 without a GPU, down to a cubin; `-- --quick`: one shape."""
    with_workspace(session, *group("cuda-compile"))
    session.run("python", "-m", "hp_tune.kernels.check", "cuda", *session.posargs)
    env = {**RANKS_ENV, "TRITON_INTERPRET": "1"}
    session.run("python", "-m", "pytest", *INTERPRETED, INTERPRETED_DSA, env=env)
    session.run("python", "-m", "pytest", COMPILED_DSA, env=RANKS_ENV)


@nox.session(default=False)
def npu_schema(session: nox.Session) -> None:
    """Check every call of torch_npu against its schemas, on fake tensors; no device, no CANN."""
    # without what it asks for, which is the torch, numpy and PyYAML of the workspace
    with_workspace(session, "--no-deps", *group("npu-schema"))
    session.run("python", "tests/npu_schema/run.py", *session.posargs)


def _npu_here() -> bool:
    return bool(list(Path("/dev").glob("davinci[0-9]*"))) or shutil.which("npu-smi") is not None


# without a device no environment is made: torch_npu without CANN breaks `import torch`
@nox.session(venv_backend=None if _npu_here() else "none", default=False)
def npu_tests(session: nox.Session) -> None:
    """Run the tests marked npu. No device: say so and pass, or fail if HP_REQUIRE_NPU=1."""
    if not _npu_here():
        reason = (
            "no Ascend device here (no /dev/davinci*, no npu-smi): nothing installed, nothing run"
        )
        if os.environ.get("HP_REQUIRE_NPU") == "1":
            session.error(f"HP_REQUIRE_NPU=1, but {reason}")
        session.log(reason)
        return
    session.install(TORCH)
    packages = [arg.replace("packages/hp-comm", "packages/hp-comm[npu]") for arg in EDITABLE]
    session.install(*group("test"), *packages)
    session.run("pytest", "-m", "npu", *session.posargs)


_wheels: dict[str, Path] = {}


def build_wheels(session: nox.Session) -> dict[str, Path]:
    """Build the five wheels, once in a run of nox, and return them by package."""
    if not _wheels:
        target = ROOT / ".nox" / "wheels"
        shutil.rmtree(target, ignore_errors=True)
        paths = (f"./packages/{package}" for package in PACKAGES)
        pip = ("python", "-m", "pip", "wheel", "--quiet", "--no-deps")
        session.run(*pip, "--wheel-dir", str(target), *paths)
        for wheel in target.iterdir():
            _wheels[wheel.name.split("-")[0].replace("_", "-")] = wheel
    return _wheels


def closure(package: str) -> list[str]:
    """Return the package and the siblings that it needs, read from their ``pyproject.toml``."""
    found = [package]
    for name in found:
        project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())[
            "project"
        ]
        siblings = (requirement.split("==")[0] for requirement in project["dependencies"])
        found += [name for name in siblings if name in PACKAGES and name not in found]
    return found


@nox.session(default=False, venv_backend="virtualenv", reuse_venv=False)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def alone(session: nox.Session, package: str) -> None:
    """Install one package from wheels into a fresh environment beside a CPU torch, and use it."""
    session.install("pip")
    wheels = build_wheels(session)
    session.install(TORCH)
    freeze = ("python", "-m", "pip", "freeze", "--all")
    before = str(session.run(*freeze, silent=True)).splitlines()
    session.install(*(str(wheels[name]) for name in closure(package)))
    after = str(session.run(*freeze, silent=True)).splitlines()
    replaced = sorted(set(before) - set(after))
    added = sorted(set(after) - set(before))
    vendors = [
        line for line in added if re.match(r"(nvidia|cuda|triton|torch)", line, re.IGNORECASE)
    ]
    strangers = [
        line for line in added if line.startswith("hp-") and _name(line) not in closure(package)
    ]
    if replaced or vendors or strangers:
        session.error(
            f"{package} replaced {replaced}, added vendors {vendors}, strangers {strangers}"
        )
    session.log(f"{package} added {', '.join(_name(line) for line in added)}")
    module = package.replace("-", "_")
    session.run("python", "-I", "-W", "error", "-c", f"import {module}")
    session.run("python", "-I", f"tests/alone/{module}.py", env=RANKS_ENV)


def _name(line: str) -> str:
    return re.split(r"[ =@]", line, maxsplit=1)[0]


@nox.session(venv_backend="none", default=False)
def bump(session: nox.Session) -> None:
    """Write one version everywhere: ``nox -s bump -- 0.2.0``."""
    if len(session.posargs) != 1 or not re.fullmatch(
        r"\d+\.\d+\.\d+((a|b|rc)\d+)?", session.posargs[0]
    ):
        session.error("bump needs one version: nox -s bump -- 0.2.0")
    version = session.posargs[0]
    for package in PACKAGES:
        path = ROOT / "packages" / package / "pyproject.toml"
        text = re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', path.read_text())
        text = re.sub(r'"(hp-[a-z]+(?:\[[a-z]+\])?)==[^"]*"', rf'"\1=={version}"', text)
        path.write_text(text)
        session.log(f"{path.relative_to(ROOT)}: {version}")
