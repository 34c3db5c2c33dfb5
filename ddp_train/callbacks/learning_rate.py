"""Log the learning rate of every parameter group; without this callback only the first one's is recorded."""

from ddp_train.interfaces import Callback, Run


class LearningRate(Callback):
    """Logs `lr/NAME` for each of the optimizer's groups, by its name or its number. Groups of one name have one rate."""

    def on_step(self, run: Run) -> None:
        if run.is_log_step:
            rates = {str(group.get("name", number)): group["lr"] for number, group in enumerate(run.optimizer.param_groups)}
            for name, rate in rates.items():
                run.log(f"lr/{name}", rate)
