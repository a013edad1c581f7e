"""Which files look like secrets, by their names: keys, passwords, tokens. They are not sent unless the user says so."""

from __future__ import annotations

from pathlib import Path

from clusterjob.ssh.ignore import Patterns

_NAMES = Patterns([
    b".env", b".env.*", b"!.env.example", b"!.env.sample", b"!.env.template", b"!.env.dist", b".envrc",
    b"id_rsa", b"id_dsa", b"id_ecdsa", b"id_ed25519", b"id_*_sk", b"*.pem", b"*.key", b"*.p12", b"*.pfx", b"*.ppk", b"*.jks", b"*.kdbx",
    b".ssh/", b".gnupg/", b".aws/", b".azure/", b".kube/", b".volc/", b"**/.docker/config.json", b"**/.config/gcloud/",
    b".netrc", b"_netrc", b".pgpass", b".npmrc", b".pypirc", b".git-credentials", b".htpasswd", b".vault-token", b"kaggle.json",
    b"credentials.json", b"client_secret*.json", b"service-account*.json", b"service_account*.json",
    b"secrets.json", b"secrets.yaml", b"secrets.yml", b"secrets.toml", b"secrets.env",
])  # fmt: skip
_MAYBE_PUBLIC = (".pem", ".key")
_MOST = 1 << 18  # bytes that are read of such a file


def looks_secret(root: Path, path: str, *, is_directory: bool) -> bool:
    """Return whether something of a directory looks like a secret.

    Args:
        root: the directory.
        path: relative to it.
        is_directory: whether it is one.
    """
    if not _NAMES.verdict(path, is_directory=is_directory):
        return False
    if is_directory or not path.endswith(_MAYBE_PUBLIC):
        return True
    with (root / path).open("rb") as stream:  # a bundle of certificates is none
        text = stream.read(_MOST)
    return b"PRIVATE KEY" in text or b"-----BEGIN " not in text or len(text) == _MOST
