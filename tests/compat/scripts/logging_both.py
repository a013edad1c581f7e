"""logging to stdout and stderr at once, a formatter with the rank, a file for each rank: facebookresearch/detectron2, utils/logger.py."""

import logging
import os
import sys

rank = os.environ["RANK"]
logger = logging.getLogger("train")
logger.setLevel(logging.DEBUG)
logger.propagate = False
for handler in (logging.StreamHandler(sys.stdout), logging.StreamHandler(), logging.FileHandler(f"log.txt.rank{rank}")):
    handler.setFormatter(logging.Formatter(f"[rank {rank}] %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
logger.info("Command line arguments: %s", sys.argv[1:])
logger.warning("lr is high")
