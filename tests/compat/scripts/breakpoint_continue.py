"""breakpoint() in a run of one process: debugging as pytorch's documentation shows it, `torchrun --nproc-per-node 1`."""

loss = 0.25
breakpoint()
print("continued", loss)
