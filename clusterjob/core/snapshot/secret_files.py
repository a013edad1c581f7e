"""Recognize files that look like secrets: keys, passwords, tokens.

Such files are found by name, some of them also by content. They are sent only with
--include-secrets.
"""

from __future__ import annotations

from pathlib import Path

from clusterjob.core.snapshot.ignore_rules import Patterns

_NAMES = Patterns(
    [
        b"*.env",
        b".env.*",
        b"!.env.example",
        b"!.env.sample",
        b"!.env.template",
        b"!.env.dist",
        b".envrc",
        b"id_rsa",
        b"id_dsa",
        b"id_ecdsa",
        b"id_ed25519",
        b"id_*_sk",
        b"*.pem",
        b"*.key",
        b"*.p12",
        b"*.pfx",
        b"*.ppk",
        b"*.jks",
        b"*.keystore",
        b"*.kdbx",
        b".ssh/",
        b".gnupg/",
        b".aws/",
        b".azure/",
        b".kube/",
        b".volc/",
        b"**/.docker/config.json",
        b"**/.config/gcloud/",
        b".huggingface/",
        b"**/huggingface/token",
        b"kubeconfig",
        b"kubeconfig.*",
        b"*.kubeconfig",
        b".aws_credentials",
        b".netrc",
        b"_netrc",
        b".pgpass",
        b".my.cnf",
        b".npmrc",
        b".pypirc",
        b".git-credentials",
        b".htpasswd",
        b".vault-token",
        b"kaggle.json",
        b".s3cfg",
        b".boto",
        b".modal.toml",
        b".databrickscfg",
        b".dockercfg",
        b"rclone.conf",
        b"*.tfstate",
        b"*.tfvars",
        b"*credentials.json",
        b"client_secret*.json",
        b"*service-account*.json",
        b"*service_account*.json",
        b"*serviceaccount*.json",
        b"*adminsdk*.json",
        b"secrets.json",
        b"secrets.yaml",
        b"secrets.yml",
        b"secrets.toml",
    ],
    simple=True,
)
_MAYBE_PUBLIC = (".pem", ".key")
_MAYBE_KEYS = Patterns(
    [b"id_*", b"*_rsa", b"*_ecdsa", b"*_ed25519", b"deploy_key*", b"deploy-key*", b".ssh_key*"],
    simple=True,
)
_MAX_BYTES = 1 << 18  # maximum bytes to read of a file that may be a key


def looks_secret(root: Path, path: str, *, is_directory: bool) -> bool:
    """Return whether a file or directory looks like a secret.

    Args:
        root: the working directory.
        path: path of the file or directory, relative to root.
        is_directory: whether the path is a directory.
    """
    lower = path.lower()
    named = bool(_NAMES.verdict(lower, is_directory=is_directory))
    if is_directory or (named and not lower.endswith(_MAYBE_PUBLIC)):
        return named
    if not named and not _MAYBE_KEYS.verdict(lower, is_directory=False):
        return False
    with (root / path).open("rb") as stream:
        text = stream.read(_MAX_BYTES)
    # A PEM file without a private key holds only certificates or public keys.
    bundle = b"-----BEGIN " in text and len(text) < _MAX_BYTES
    return b"PRIVATE KEY" in text or (named and not bundle)
