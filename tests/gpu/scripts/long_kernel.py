"""Wait for a kernel that runs for about 20 s."""

import torch

from clusterjob import bootstrap


def wait_for_kernel() -> None:
    torch.cuda._sleep(int(20 * clock))
    print("in the kernel", flush=True)
    torch.cuda.synchronize()


with bootstrap.init() as ctx:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(10_000_000)
    begin.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    torch.cuda.synchronize()
    clock = 100_000_000 / (begin.elapsed_time(end) / 1000)  # cycles per second
    wait_for_kernel()
    print("the kernel has ended", flush=True)
