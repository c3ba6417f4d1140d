"""an archived success that joined a group, and each use of one"""

import sqlalchemy as sa
from alembic import op


revision = '0006'
down_revision = '0005'
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table('group') as batch_op:
        batch_op.add_column(sa.Column('replay', sa.String(), nullable=False, server_default=''))
    op.create_table(
        'replay',
        sa.Column('batch', sa.String(), nullable=False),
        sa.Column('group_id', sa.String(), nullable=False),
        sa.Column('episode', sa.String(), nullable=False),
        sa.Column('advantage', sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(['batch'], ['batch.id']),
        sa.ForeignKeyConstraint(['episode'], ['episode.id']),
        sa.PrimaryKeyConstraint('batch', 'group_id'),
    )
    with op.batch_alter_table('replay') as batch_op:
        batch_op.create_index(batch_op.f('ix_replay_episode'), ['episode'], unique=False)


def downgrade() -> None:
    op.drop_table('replay')
    with op.batch_alter_table('group') as batch_op:
        batch_op.drop_column('replay')
