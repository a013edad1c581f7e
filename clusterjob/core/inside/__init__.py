"""Run commands, shells and port forwards inside a running job; `connection` starts each."""
