"""The small byte model with a batch that is large enough to be shared finely."""

from paceline.runtime.workloads.bytes_lm import BytesLM


class LargeBatch(BytesLM):
    """256 windows per step: the device that is four times slower still gets more than twenty."""

    name = "bytes-lm-large-batch"
    variants = {"small": {"width": 128, "layers": 4, "context": 64, "global_batch": 256, "learning_rate": 2e-3}}  # noqa: RUF012
