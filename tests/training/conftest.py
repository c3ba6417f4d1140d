from tests.training.fixtures import one_thread, policy, s3, world

__all__ = ["one_thread", "policy", "s3", "world"]
