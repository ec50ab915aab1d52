//! The file-level journals: logical records in an area of each stream.
