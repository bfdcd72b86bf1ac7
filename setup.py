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
    author="the horovod_sparse authors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["distributed training", "gradient compression", "Horovod", "MPI", "PyTorch", "TensorFlow", "Keras"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["horovod_sparse", "horovod_sparse.*"]),
    package_data={"horovod_sparse": ["py.typed"]},
    install_requires=["numpy>=1.26", "numba>=0.60", "typer>=0.16"],
    entry_points={"console_scripts": ["horovod-sparse = horovod_sparse.cli:app"]},
    # Horovod is in none of these: its last release builds only with the edits of tools/set_up.py.
    extras_require={
        "torch": ["torch>=2.0"],
        "tensorflow": ["tensorflow>=2.16"],
        "report": ["matplotlib>=3.8"],
        "tensorboard": ["tensorboardX>=2.6.2"],
        "huggingface": ["transformers>=4.46", "accelerate>=0.34"],
        "docs": ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"],
        "test": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ml_dtypes",
            "psutil",
            "ruff",
            "mypy",
            "build",
        ],
        "bench": ["torch>=2.0", "matplotlib>=3.8", "scikit-learn", "mlxtend", "rich"],
    },
)
