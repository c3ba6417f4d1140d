from tests.training.fixtures import one_thread, policy, s3, s3_access, world

__all__ = ["one_thread", "policy", "s3", "s3_access", "world"]
