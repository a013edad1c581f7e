"""A Hydra application as people write one, with a group, a resolver and an error."""

from __future__ import annotations

import textwrap
from pathlib import Path

from launching import write_tree

APP = """
    import os
    import pathlib

    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    OmegaConf.register_new_resolver("twice", lambda value: 2 * value)


    @hydra.main(version_base=None, config_path="conf", config_name="config")
    def main(cfg: DictConfig) -> float:
        job = HydraConfig.get()
        print("rank", os.environ["RANK"], cfg.lr, cfg.db.name, cfg.text, job.job.num, flush=True)
        if cfg.lr > 5:
            raise ValueError("the rate is too large")
        pathlib.Path(job.runtime.output_dir, f"rank{os.environ['RANK']}.txt").write_text(
            f"{job.job.num} {cfg.double} {job.job.id}"
        )
        return cfg.lr * 10


    if __name__ == "__main__":
        main()
"""
CONFIG = """
    defaults:
      - db: mysql
      - _self_
    lr: 0.1
    double: ${twice:${lr}}
    text: plain
"""
# A sweeper that needs the jobs' return values, such as Optuna's: it prints them.
SWEEPER = """
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from hydra.plugins.sweeper import Sweeper

    ConfigStore.instance().store(
        group="hydra/sweeper", name="mine", node={"_target_": "hydra_plugins.mine.Mine"}
    )


    class Mine(Sweeper):
        def setup(self, *, hydra_context, task_function, config):
            self.launcher = Plugins.instance().instantiate_launcher(
                hydra_context=hydra_context, task_function=task_function, config=config
            )

        def sweep(self, arguments):
            found = self.launcher.launch([["lr=1"], ["lr=3"]], initial_job_idx=0)
            print("values", [one.return_value for one in found])
"""


def write_app(directory: Path) -> None:
    """Write the application into a directory."""
    files = {
        "app.py": APP,
        "conf/config.yaml": CONFIG,
        "conf/db/mysql.yaml": "name: mysql\n",
        "conf/db/pg.yaml": "name: pg\n",
        "hydra_plugins/mine/__init__.py": SWEEPER,
    }
    write_tree(directory, **{name: textwrap.dedent(text) for name, text in files.items()})
