"""Give the package index the README with absolute links: it shows it without the files beside it."""

import re
from pathlib import Path

from setuptools import setup

_PROJECT = "https://github.com/ckpt-storage/ckpt-storage"


def long_description() -> str:
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\((?![a-z]+:|#)", f"]({_PROJECT}/blob/main/", text)
    return re.sub(r'\b(src|srcset)="(?![a-z]+:)', rf'\1="{_PROJECT}/raw/main/', text)


setup(long_description=long_description(), long_description_content_type="text/markdown")
