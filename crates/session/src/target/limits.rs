//! The bounds of one connection (T18), and of all connections together (T28).

/// Bytes of a logical block. Nothing smaller is served: M1 is about 4096 bytes.
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
/// Most entries of an I/O submission queue (CAP.MQES + 1).
pub const QUEUE_ENTRIES_MAX: u16 = 256;
/// Most entries of the admin queue.
pub const ADMIN_ENTRIES_MAX: u16 = 64;
/// Most I/O queues of a controller.
pub const IO_QUEUES_MAX: u16 = 128;
/// Most controllers.
pub const CONTROLLERS_MAX: usize = 1024;
/// Most Asynchronous Event Requests held (AERL + 1).
pub const ASYNC_EVENTS_MAX: usize = 4;
/// Bytes that a connection's reads and R2T transfers may hold at once, unsent responses included. A
/// command that does not fit waits for its turn. In-capsule data waiting for a device comes on top:
/// at most [`QUEUE_ENTRIES_MAX`] × [`IN_CAPSULE_BYTES`].
pub const TRANSFER_BUDGET: usize = 8 << 20;
/// Unsent bytes at which no further command is taken.
pub const UNSENT_BYTES_MAX: usize = TRANSFER_BUDGET + (1 << 20);
/// Bytes of data that each connection may hold in any case: one command of the largest size.
pub const CONNECTION_BYTES: usize = TRANSFER_BYTES_MAX as usize;
/// Bytes of data that all connections together may hold beyond [`CONNECTION_BYTES`] each, unless
/// configured otherwise.
pub const MEMORY_BYTES: usize = 1 << 30;
/// In-capsule data cannot be made to wait. So space for the most that a queue may bring is set
/// aside when it is connected. For all queues together, this is at most so many times the memory
/// for other data.
pub const CAPSULES_TO_MEMORY: usize = 4;
/// Time limit from accept to the first PDU and from there to the next until a Fabrics Connect has
/// succeeded, and from the first byte of a PDU to its last.
pub const STALL_NS: u64 = 10_000_000_000;
/// Time limit from accept to a successful Fabrics Connect, whatever is sent before it (T28).
pub const CONNECT_NS: u64 = 3 * STALL_NS;
/// Time limit for data that an R2T has requested, and for a peer that does not take its answers.
pub const DATA_STALL_NS: u64 = 30_000_000_000;
/// Keep-alive granularity in milliseconds (KAS counts 100 ms).
pub const KEEP_ALIVE_STEP_MS: u32 = 100;
/// The longest lease that is granted, milliseconds: a day. A host that claims a volume and does not
/// call again keeps its namespaces for this time from every host that does not take over (T25).
pub const LEASE_MS_MAX: u32 = 24 * 60 * 60 * 1000;
/// Most log slots of one stream that a claim gets: 16 MiB of log, 16 times as many as the target
/// itself chooses.
pub const STREAM_SLOTS_MAX: u32 = 1 << 18;
/// Most log slots of all streams of all volumes together: 2 GiB of log. A claim that would exceed
/// this is refused. A slot takes 16 bytes of memory, and another 64 if the log is a block device,
/// which may be far larger than the memory. Two volumes with the most streams fit, each with as
/// many slots as the target itself chooses.
pub const LOG_SLOTS_MAX: u64 = 1 << 25;
/// Most fences of one volume's claims, and of commands to forget it, that wait for operations in
/// flight at a time.
pub const FENCES_MAX: usize = 64;
/// The highest group number that a host may start from or release: far beyond the last group of any
/// stream, far below the wrap of numbers.
pub const SEQ_MAX: u64 = 1 << 62;
