"""Packaging of megatron-mux. Settings of the tools are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

# Read, not imported: the package needs torch, and building a wheel does not.
VERSION = next(
    line.split('"')[1]
    for line in (HERE / "megatron_mux" / "version.py").read_text(encoding="utf-8").splitlines()
    if line.startswith("__version__")
)

TRITON = "triton>=3.6; platform_system == 'Linux' and platform_machine in 'x86_64 aarch64'"
QUANTISED = ["bitsandbytes>=0.49", "compressed-tensors>=0.10", "torchao>=0.15"]
TRACKERS = ["wandb>=0.19", "mlflow-skinny>=2.20"]
METRICS = ["rouge-score>=0.1.2"]
SWEEP = ["optuna>=4,<6"]
SERVE = [
    *("fastapi>=0.115,<1", "uvicorn>=0.30,<1", "python-multipart>=0.0.18"),
    *("sqlalchemy>=2.0,<3", "alembic>=1.13,<2"),
]
TEST = [
    *("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6", TRITON),
    *(*SERVE, "httpx>=0.27", "openai>=2,<4"),
    *("trl>=1.10,<2", *QUANTISED, *METRICS, *TRACKERS, *SWEEP),  # what results are compared with
]
LINT = ["ruff>=0.14", "mypy>=1.15", "import-linter>=2.6", "types-PyYAML"]
DOCS = ["sphinx>=8", "myst-parser>=4", "furo", "sphinx-argparse>=0.5"]
QUICKSTART = ["gguf>=0.17,<1"]
PRIVACY = ["dp-accounting>=0.6,<1"]

setup(
    name="megatron-mux",
    version=VERSION,
    description="Train many PEFT adapters at once on one frozen Megatron-Core backbone",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    entry_points={"console_scripts": ["megatron-mux = megatron_mux.cli.main:main"]},
    python_requires=">=3.11",
    # `pipeline` and `fusion` at the root are links into the package: only the package itself is installed.
    packages=find_packages(include=["megatron_mux*"]),
    package_data={
        "megatron_mux": [
            "py.typed",
            "arguments/megatron_flags.txt",
            "serve/database/migrations/versions/*.py",
        ]
    },
    install_requires=[
        "megatron-core>=0.16.1,<0.20",
        "torch>=2.11",
        "transformers>=5,<6",
        "peft>=0.19,<1",
        "datasets>=4,<6",
        "safetensors>=0.5",
        "huggingface-hub>=1",
        "tokenizers>=0.22",
        "numpy>=1.26",
        "pydantic>=2.8,<3",
        "matplotlib>=3.8",  # curves of sweeps
        "pyyaml>=6",
        "jinja2>=3.1",  # chat templates
        "rich>=13",
        "tensorboard>=2.17",
        "psutil>=5.9",
        "scipy>=1.11",  # linear programs (HiGHS) of the placement of experts
        "grpcio>=1.60",  # split fine-tuning
        "cryptography>=42",
        "prometheus-client>=0.20",
    ],
    extras_require={
        "gpu": [TRITON, "liger-kernel>=0.5"],  # our kernels; the rivals of `make gpu-bench`
        "te": ["transformer-engine[pytorch]>=2"],  # for models of users' own in the pipeline plug-in
        "test": TEST,
        "trackers": TRACKERS,  # of training.report_to; tensorboard and csv need nothing more
        "sweep": SWEEP,  # of samplers in sweeps; grids, random samples and schedulers need nothing more
        "serve": SERVE,  # of `megatron-mux serve`
        "quickstart": QUICKSTART,
        "privacy": PRIVACY,  # epsilon of noise on what leaves a client of split fine-tuning
        "docs": DOCS,
        "dev": [*TEST, *LINT, *DOCS, *QUICKSTART, *PRIVACY],
    },
)
