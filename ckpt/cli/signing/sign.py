"""`ckpt sign`: sign a checkpoint, or an export."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated

import typer

import ckpt
from ckpt.cli.options import Expect, Json, StorageOptions, parse_storage_options
from ckpt.cli.printing.output import command
from ckpt.errors import ConfigurationError
from ckpt.words import count, shown

EXAMPLES = """
ckpt sign s3://bucket/run/step-1000 --key key.pem
ckpt sign run/step-7 --key 'pkcs11:token=ci;object=k?module-name=softhsm2'
ckpt sign --export exported/ --key key.pem
"""

PASSWORD = "CKPT_KEY_PASSWORD"


def sign(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The checkpoint, or with --export a folder of this machine.")
    ],
    key: Annotated[
        str,
        typer.Option(
            metavar="KEY", help="A private key: a PEM file (P-256, P-384, P-521), or a pkcs11: URI."
        ),
    ],
    export: Annotated[
        bool, typer.Option("--export", help="Sign all files of a folder, for OpenSSF's model_signing.")
    ] = False,
    run: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The run that it is of, if you know better than the folder."),
    ] = None,
    expect: Expect = None,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Sign a checkpoint that was saved with block digests, or a model's folder.

    The signature of a checkpoint stands beside its index; it names the run, the step, and the signed checkpoint
    before it. No data is read. --export writes model.sig, which `model_signing verify key` accepts. The password
    of an encrypted key is taken from CKPT_KEY_PASSWORD.
    """
    with command(json) as output:
        options = parse_storage_options(storage_options)
        password = os.environ.get(PASSWORD)
        if export:
            if expect is not None or run is not None or options:
                raise ConfigurationError(
                    "--export signs a folder of this machine: it takes neither --expect nor options"
                )
            with output.working("signing"):
                exported = ckpt.sign_export(url, key, password=password)
            if output.as_json:
                output.json(vars(exported))
            else:
                output.print(f"signed {count(exported.files, 'file')}: {shown(exported.signature)}")
            return
        with output.working("signing"):
            signed = ckpt.sign(url, key, storage_options=options, password=password, expect=expect, run=run)
        if output.as_json:
            before = (
                None
                if signed.before is None
                else {"step": signed.before.step, "digest": signed.before.digest}
            )
            output.json({**dataclasses.asdict(signed), "before": before})
            return
        step = "" if signed.step is None else f" of step {signed.step}"
        after = "" if signed.before is None else f", after that of step {signed.before.step}"
        output.print(f"signed {shown(signed.url)}{step}{after}", f"  {signed.digest}")
