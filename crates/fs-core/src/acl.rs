//! POSIX access control lists.
