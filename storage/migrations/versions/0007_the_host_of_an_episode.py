"""the host that an episode's sandbox lived on"""

import sqlalchemy as sa
from alembic import op


revision = '0007'
down_revision = '0006'
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table('episode') as batch_op:
        batch_op.add_column(sa.Column('host', sa.String(), nullable=False, server_default=''))
        batch_op.create_index(batch_op.f('ix_episode_host'), ['host'], unique=False)


def downgrade() -> None:
    with op.batch_alter_table('episode') as batch_op:
        batch_op.drop_index(batch_op.f('ix_episode_host'))
        batch_op.drop_column('host')
