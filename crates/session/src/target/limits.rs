//! What one connection may cost (T18), and what all of them together may (T28): every bound in one
//! place.

/// Bytes of a logical block. Nothing smaller is served: media assumption 1 is about 4096 bytes.
pub const BLOCK_SIZE: u32 = riopipe_order::block_device::BLOCK_BYTES as u32;
/// In-capsule data of I/O commands, bytes; advertised as IOCCSZ.
pub const IN_CAPSULE_BYTES: u32 = 32 * 1024;
/// In-capsule data of admin and Fabrics commands, bytes (TCP §3.3.2.1: 8 KiB).
pub const ADMIN_CAPSULE_BYTES: u32 = 8 * 1024;
/// Largest transfer of one command, as a power of two of 4 KiB pages: 2⁸ pages are 1 MiB. MDTS.
pub const MDTS: u8 = 8;
/// [`MDTS`] in bytes.
pub const TRANSFER_BYTES_MAX: u32 = 4096 << MDTS;
/// Data of one H2CData PDU, bytes (MAXH2CDATA).
pub const H2C_DATA_BYTES_MAX: u32 = 128 * 1024;
/// Entries of an I/O submission queue at most (CAP.MQES + 1).
pub const QUEUE_ENTRIES_MAX: u16 = 256;
/// Entries of the admin queue at most.
pub const ADMIN_ENTRIES_MAX: u16 = 64;
/// I/O queues of a controller at most.
pub const IO_QUEUES_MAX: u16 = 128;
/// Controllers at most.
pub const CONTROLLERS_MAX: usize = 1024;
/// Asynchronous Event Requests held at most (AERL + 1).
pub const ASYNC_EVENTS_MAX: usize = 4;
/// Bytes that a connection's reads and R2T transfers may hold at once, unsent responses
/// included; what doesn't fit waits for its turn. In-capsule data waiting for a device comes on
/// top: at most [`QUEUE_ENTRIES_MAX`] × [`IN_CAPSULE_BYTES`].
pub const TRANSFER_BUDGET: usize = 8 << 20;
/// Unsent bytes at which no further command is taken.
pub const UNSENT_BYTES_MAX: usize = TRANSFER_BUDGET + (1 << 20);
/// Bytes of data that each connection may hold whatever the others hold: one command of the largest
/// size.
pub const CONNECTION_BYTES: usize = TRANSFER_BYTES_MAX as usize;
/// Bytes of data that all connections together may hold beyond [`CONNECTION_BYTES`] each, unless
/// told otherwise.
pub const MEMORY_BYTES: usize = 1 << 30;
/// In-capsule data cannot be made to wait, so room for all that a queue may bring is set aside when
/// it is connected: so many times as much as the rest of the data gets, for all queues together.
pub const CAPSULES_TO_MEMORY: usize = 4;
/// From accept to a completed Fabrics Connect, and from the first byte of a PDU to its last.
pub const STALL_NS: u64 = 10_000_000_000;
/// For an I/O queue's promised data (R2T) and for a peer that does not take what it is sent.
pub const DATA_STALL_NS: u64 = 30_000_000_000;
/// Keep-alive granularity in milliseconds (KAS counts 100 ms).
pub const KEEP_ALIVE_STEP_MS: u32 = 100;
/// The longest lease that is granted, milliseconds: a day. For so long a host that claims and goes
/// away keeps a volume's namespaces from everybody who does not take over (T25).
pub const LEASE_MS_MAX: u32 = 24 * 60 * 60 * 1000;
/// The highest group number that a host may start from or release: far beyond what a stream
/// reaches, far below where numbers would wrap.
pub const SEQ_MAX: u64 = 1 << 62;
