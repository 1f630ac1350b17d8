"""What pyproject.toml cannot say: ``conf/`` is ``nemo_aligner/conf`` in a wheel."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["nemo_aligner*"]), "nemo_aligner.conf"],
    package_dir={"nemo_aligner.conf": "conf"},
)
