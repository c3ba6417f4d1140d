"""the tail of a batch's wait, and the members of a group that closed before all its siblings had ended"""

import sqlalchemy as sa
from alembic import op


revision = '0005'
down_revision = '0004'
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table('batch') as batch_op:
        batch_op.add_column(sa.Column('tail', sa.JSON(), nullable=False, server_default='{}'))
    with op.batch_alter_table('group') as batch_op:
        batch_op.add_column(sa.Column('members', sa.JSON(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table('group') as batch_op:
        batch_op.drop_column('members')
    with op.batch_alter_table('batch') as batch_op:
        batch_op.drop_column('tail')
