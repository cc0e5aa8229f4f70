#!/usr/bin/env bash
# Makes the environment, checks everything, or trains; see `bash run.sh help`.
set -euo pipefail

extras=cli,config,flax,progress,summary,tensorboard # of users of the package
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)

usage() {
  cat <<'EOF'
bash run.sh                  make the environments, lint, check types, run every test and limit
bash run.sh quick            the same without the slow tests: an answer within two minutes
bash run.sh train [flags]    make the environment, train on real digits, dense and sparse
bash run.sh train --help     list the flags of training
bash run.sh example NAME     make the example's own environment, run it; without NAME, list the names
bash run.sh package          build wheel and sdist; test the installed wheel away from this folder
bash run.sh lowest           run the tests with the oldest versions that pyproject.toml allows
bash run.sh docs             make the environment, build the site; a warning is an error
bash run.sh baselines        make the environment, measure every algorithm; --help lists the flags
bash run.sh accelerators     compile training steps for TPUs and GPUs that are not there; --help lists the flags
bash run.sh help             this text

The environment is the folder .venv beside this script, that of an example lies in examples/NAME;
delete it to start afresh.
PYTHON=/path/to/python bash run.sh chooses the Python (3.11 or newer) that it is made with.
EOF
}

fail() {
  printf 'run.sh: %s\n' "$*" >&2
  exit 1
}

works() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11)
  [[ -z ${PYTHON-} ]] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    if works "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer with the modules venv and ensurepip (on Debian and Ubuntu: the" \
    "package python3-venv) among: ${candidates[*]}. Install one, or name it:" \
    "PYTHON=/path/to/python bash run.sh"
}

# Whether the environment was completed here, by the Python that is asked for.
is_usable() {
  local version='import sys; print(sys.base_prefix, sys.version)'
  [[ -f $stamp && $(head -n 1 "$stamp") == "$root" ]] && works "$venv/bin/python" || return 1
  [[ -z ${PYTHON-} || $("$PYTHON" -c "$version" 2>/dev/null) == "$("$venv/bin/python" -c "$version")" ]]
}

# Makes the environment of the project, or that of the example in the folder $1.
set_up() {
  local python wanted packages=(--editable "$root[dev]") files=("$root/setup.py" "$root/pyproject.toml")
  if [[ $# -gt 0 ]]; then
    packages=(--requirement "$1/requirements.txt" --editable "$root")
    files+=("$1/requirements.txt")
  fi
  venv=${1-$root}/.venv
  stamp=$venv/.installed # written when an installation is complete; says what was installed
  wanted=$(cat "${files[@]}" | cksum)
  if ! is_usable; then
    python=$(find_python)
    echo "Making $venv with $("$python" --version)" >&2
    rm -rf -- "$venv"
    "$python" -m venv "$venv"
  elif [[ $(tail -n 1 "$stamp") == "$wanted" ]]; then
    return
  fi
  rm -f -- "$stamp"
  echo "Installing packages (minutes the first time)" >&2
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check "${packages[@]}"
  printf '%s\n%s\n' "$root" "$wanted" >"$stamp.new"
  mv -- "$stamp.new" "$stamp"
}

# Runs the example $1 in an environment of its own, with the other arguments.
run_example() {
  local name=${1-} names=("$root"/examples/*/requirements.txt)
  names=("${names[@]%/requirements.txt}")
  [[ $name != */* && -f $root/examples/$name/requirements.txt ]] ||
    fail "there is no example '$name'. The examples are: ${names[*]##*/}"
  set_up "$root/examples/$name"
  exec "$venv/bin/python" "$root/examples/$name/train.py" "${@:2}"
}

# Lints, checks types, and runs the tests that the arguments of pytest choose.
check() {
  cd -- "$root"
  unset PYTHONDONTWRITEBYTECODE # all workers and programs of tests read what one of them parsed
  echo "== ruff"
  "$venv/bin/python" -m ruff check .
  "$venv/bin/python" -m ruff format --check .
  echo "== mypy"
  "$venv/bin/python" -m mypy
  echo "== pytest"
  "$venv/bin/python" -m pytest -n 2 "$@"
}

# Compiles steps for the TPUs and GPUs that the arguments choose; no device is there.
compile_steps() {
  set_up "$root/benchmarks/accelerators"
  # Nothing asks for the devices of this machine, and no kernel is timed on one.
  JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost \
    TPU_ACCELERATOR_TYPE=v5litepod-4 XLA_FLAGS=--xla_gpu_autotune_level=0 \
    PYTHONPATH=$root "$venv/bin/python" -P -m benchmarks.accelerators "$@"
}

# Runs, with the Python $1, the tests that need the installed package and no checkout, in an empty
# folder; the doctests of the package with them.
test_installed() {
  local others=(examples documents.py kill_resume.py runs/test_models.py # need pages or examples
    updaters/{hook_tables,test_table_of_hooks,test_overrides_take_effect}.py
    test_{baselines,benchmarks,docs,language,mutants,optimizers,package,run_sh,typing}.py)
  folder=$(mktemp -d)
  trap 'rm -rf -- "$folder"' EXIT
  cp -r -- "$root/tests" "$root/pyproject.toml" "$folder"
  cd -- "$folder"
  "$1" -P -m pytest -n 2 -m "not slow" \
    "${others[@]/#/--ignore=tests/}" tests --pyargs sparsity
  cd -- "$root"
}

# Builds the site from the pages, the docstrings and the stored outputs of the notebooks.
build_docs() {
  set_up
  PYTHONPATH=$root JAX_PLATFORMS=cpu "$venv/bin/python" -P -m sphinx -W --keep-going -q \
    -d "$root/docs/_build/doctrees" "$root/docs" "$root/docs/_build/html"
  echo "The site is in docs/_build/html; open index.html."
}

# Builds the distributions, and tests them in an environment of their own.
check_package() {
  local clean=$root/.venv-package
  set_up
  rm -rf -- "$root/dist" "$clean"
  echo "== build"
  "$venv/bin/python" -m build --outdir "$root/dist" "$root" >/dev/null
  "$(find_python)" -m venv "$clean"
  echo "== sdist"
  "$clean/bin/python" -m pip install -qq --disable-pip-version-check "$root"/dist/*.tar.gz
  "$clean/bin/sparsity" --version
  echo "== wheel"
  "$clean/bin/python" -m pip uninstall -qq --yes jax-sparsity
  "$clean/bin/python" -m pip install -qq --disable-pip-version-check "$(echo "$root"/dist/*.whl)[$1]"
  test_installed "$clean/bin/python"
}

# Runs the tests with the oldest versions of what the package and its extras need.
check_lowest() {
  local lowest=$root/.venv-lowest
  rm -rf -- "$lowest" "$root/build/lib" # setuptools would install modules of an earlier build, too
  "$(find_python)" -m venv "$lowest"
  "$lowest/bin/python" - "$root/pyproject.toml" "$@" >"$lowest/constraints.txt" <<'EOF'
import sys, tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
extras = project["optional-dependencies"]
needs = project["dependencies"] + sum((extras[name] for name in sys.argv[2].split(",")), [])
print(*(need.replace(">=", "==") for need in needs), sep="\n")
EOF
  "$lowest/bin/python" -m pip install -qq --disable-pip-version-check \
    --constraint "$lowest/constraints.txt" "$root[$1,test]"
  test_installed "$lowest/bin/python"
}

case ${1-check} in
  check)
    [[ $# -le 1 ]] || fail "check takes no arguments; see 'bash run.sh help'."
    set_up
    check
    if [[ $(uname -sm) == "Linux x86_64" ]]; then # for which libtpu and the CUDA plugin exist
      echo "== accelerators"
      compile_steps --limits
    fi
    ;;
  quick)
    [[ $# -le 1 ]] || fail "quick takes no arguments; see 'bash run.sh help'."
    set_up
    check -m "not slow"
    ;;
  train)
    shift
    set_up
    PYTHONPATH=$root exec "$venv/bin/python" -P -m examples.mnist.train "$@"
    ;;
  baselines)
    shift
    set_up
    PYTHONPATH=$root exec "$venv/bin/python" -P -m baselines.run "$@"
    ;;
  accelerators)
    shift
    compile_steps "$@"
    ;;
  docs)
    [[ $# -le 1 ]] || fail "docs takes no arguments; see 'bash run.sh help'."
    build_docs
    ;;
  package)
    check_package "$extras,test"
    ;;
  lowest)
    check_lowest "$extras"
    ;;
  example)
    shift
    run_example "$@"
    ;;
  help | -h | --help) usage ;;
  *) fail "there is no command '$1'; see 'bash run.sh help'." ;;
esac
