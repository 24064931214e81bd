-- What was captured. A row is the entry in the stream: its place is its place among the changes of
-- its transaction. Rows may be deleted at any time; those who follow have them from the WAL.
CREATE TABLE IF NOT EXISTS millrace.sql_ddl_statements (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    captured_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The event, such as ddl_command_end; 'lost' if something went wrong in the event trigger.
    event text NOT NULL,
    command_tag text NOT NULL,
    -- What the client sent. For the reader: the command itself is cut from it, or from the context.
    current_query text,
    -- The functions and statements from which the command was called, in English.
    context text,
    -- When the client's string began, which is the same for all its statements.
    statement_at text,
    role text,
    xid text,
    -- How many functions and blocks are around the command.
    depth text,
    -- JSON: the schemas that names were looked up in; settings on which a command depends.
    search_path text,
    settings text,
    -- JSON: the objects of the command, each with a description of what has become of it.
    objects text,
    -- JSON: what is known of tables besides.
    facts text,
    error text
);
-- Whose publications are extended when a table appears.
CREATE TABLE IF NOT EXISTS millrace.ddl_publication (
    slot name PRIMARY KEY,
    with_identity name NOT NULL,
    insert_only name NOT NULL,
    -- False if filters decide about tables by more than these names.
    is_extended boolean NOT NULL,
    left_out_schemas name[] NOT NULL DEFAULT '{}',
    left_out_tables text[] NOT NULL DEFAULT '{}'
);
