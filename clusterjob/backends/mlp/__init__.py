"""The MLP backend: a platform that sets MLP_*-style variables."""
