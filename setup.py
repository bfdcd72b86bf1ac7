import re
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
version = re.search(r'^__version__ = "(.+)"$', (root / "horovod_sparse" / "__init__.py").read_text(), re.MULTILINE)
assert version, "horovod_sparse/__init__.py has no __version__"

setup(
    name="horovod_sparse",
    version=version[1],
    description="Gradient compression for Horovod, switched on by one argument: MiCRO, A2SGD, top-k, QSGD",
    long_description=(root / "README.md").read_text(),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=find_packages(include=["horovod_sparse", "horovod_sparse.*"]),
    package_data={"horovod_sparse": ["py.typed"]},
    install_requires=["numpy>=1.26", "numba>=0.60", "typer>=0.12"],
    entry_points={"console_scripts": ["horovod-sparse = horovod_sparse.cli:app"]},
    extras_require={
        "torch": ["torch>=2.0"],
        "tensorflow": ["tensorflow>=2.16"],
        "report": ["matplotlib>=3.8"],
        "tensorboard": ["tensorboard>=2.16"],
        "huggingface": ["transformers>=4.46", "accelerate>=0.34"],
        "docs": ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"],
        "test": ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ml_dtypes", "ruff", "mypy", "build"],
        "bench": ["torch>=2.0", "matplotlib", "scikit-learn", "mlxtend"],
    },
)
