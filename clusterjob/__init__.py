"""Write a distributed training script once; one command runs it here, over SSH, under Slurm or inside a platform."""

__version__ = "0.1.0"
