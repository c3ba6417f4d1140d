"""an operator's marks on rewards that were wrong, and how many commands a task's oracle runs"""

import sqlalchemy as sa
import sqlmodel
from alembic import op


revision = '0010'
down_revision = '0009'
branch_labels = None
depends_on = None

TEXT = sqlmodel.sql.sqltypes.AutoString()


def upgrade() -> None:
    op.create_table(
        'quarantinemark',
        sa.Column('run', TEXT, nullable=False),
        sa.Column('kind', TEXT, nullable=False),
        sa.Column('target', TEXT, nullable=False),
        sa.Column('number', sa.Integer(), nullable=False),
        sa.Column('why', TEXT, nullable=False),
        sa.Column('by', TEXT, nullable=False),
        sa.Column('since', sa.Float(), nullable=False),
        sa.Column('undone_at', sa.Float(), nullable=True),
        sa.Column('undone_by', TEXT, nullable=False),
        sa.Column('undone_why', TEXT, nullable=False),
        sa.ForeignKeyConstraint(['run'], ['run.id']),
        sa.PrimaryKeyConstraint('run', 'kind', 'target', 'number'),
    )
    with op.batch_alter_table('task') as batch_op:
        batch_op.add_column(sa.Column('oracle_commands', sa.Integer(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table('task') as batch_op:
        batch_op.drop_column('oracle_commands')
    op.drop_table('quarantinemark')
