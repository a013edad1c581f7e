"""An import that fails on every rank: a package that the environment lacks."""

import torch  # noqa: F401

import no_such_package_anywhere  # noqa: F401
