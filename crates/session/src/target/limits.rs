//! The limits of one connection, and of all connections together. They keep a host from using up
//! the memory or the time of a target (traps T18, T28).

/// Bytes of a logical block. The target serves no smaller blocks, because the assumption about
/// atomic writes of a drive (assumption M1) is about 4096 bytes.
pub const BLOCK_SIZE: u32 = riopipe_order::block_device::BLOCK_BYTES as u32;
/// In-capsule data of I/O commands, bytes; advertised as IOCCSZ.
pub const IN_CAPSULE_BYTES: u32 = 32 * 1024;
/// In-capsule data of admin and Fabrics commands, bytes (TCP §3.3.2.1: 8 KiB).
pub const ADMIN_CAPSULE_BYTES: u32 = 8 * 1024;
/// The largest transfer of one command, as a power of two of 4 KiB pages: 2¹¹ pages are 8 MiB. NVMe
/// calls it Maximum Data Transfer Size.
pub const MDTS: u8 = 11;
/// The largest transfer of one command ([`MDTS`]), bytes.
pub const TRANSFER_BYTES_MAX: u32 = 4096 << MDTS;
/// The number of ranges that a Dataset Management command should have at most (DMRL). The field has
/// 8 bits, so the most that a command can have, 256, is not announced.
pub const DSM_RANGES: u8 = 255;
/// The number of blocks that one range of a Dataset Management command should have at most (DMRSL):
/// 1 GiB. A longer range is deallocated in pieces of this size.
pub const DSM_RANGE_BLOCKS: u32 = 1 << 18;
/// The largest Write Zeroes, as a power of two of 4 KiB pages (WZSL): as many blocks as the command
/// can name.
pub const WZSL: u8 = 16;
/// The most source ranges of a Copy (MSRC + 1). Their list has 4 KiB.
pub const COPY_RANGES_MAX: u32 = 128;
/// The most blocks of one source range of a Copy (MSSRL).
pub const COPY_RANGE_BLOCKS_MAX: u32 = TRANSFER_BYTES_MAX / BLOCK_SIZE;
/// The most blocks of a Copy (MCL): 8 MiB, as of any other command. On a drive that completes
/// operations at once, a command is carried out to its end before those of other connections.
pub const COPY_BLOCKS_MAX: u32 = COPY_RANGE_BLOCKS_MAX;
/// The largest Verify, as a power of two of 4 KiB pages (VSL): 8 MiB ([`MDTS`]).
pub const VSL: u8 = MDTS;
/// The most bytes of data in one H2CData PDU (MAXH2CDATA).
pub const H2C_DATA_BYTES_MAX: u32 = 128 * 1024;
/// The most entries of an I/O submission queue (CAP.MQES + 1).
pub const QUEUE_ENTRIES_MAX: u16 = 256;
/// The most entries of the admin queue.
pub const ADMIN_ENTRIES_MAX: u16 = 64;
/// The most I/O queues of a controller.
pub const IO_QUEUES_MAX: u16 = 128;
/// The most controllers of a target.
pub const CONTROLLERS_MAX: usize = 1024;
/// The most Asynchronous Event Requests that a controller keeps (AERL + 1).
pub const ASYNC_EVENTS_MAX: usize = 4;
/// The most Abort commands of a controller that are carried out at once (ACL + 1).
pub const ABORTS_MAX: usize = 4;
/// The most commands of a connection that may be aborted while their data arrives, and whose data
/// has not come completely since. A further one is not aborted.
pub const ABORTED_TRANSFERS_MAX: u16 = 4;
/// The most bytes that the reads and R2T transfers of a connection may hold at once, together with
/// its unsent bytes. A command that does not fit waits. In-capsule data that waits for a drive is
/// not counted: it has at most [`QUEUE_ENTRIES_MAX`] × [`IN_CAPSULE_BYTES`] bytes.
pub const TRANSFER_BUDGET: usize = 8 << 20;
/// A connection with more unsent bytes than this sends them before it takes the next command, as long
/// as its socket takes bytes. So the data of many reads goes to the socket from memory that the
/// processor's cache still has, and the same memory serves the next reads.
pub const SEND_FIRST_BYTES: usize = 1 << 20;
/// A connection with more unsent bytes than this takes no further command.
pub const UNSENT_BYTES_MAX: usize = TRANSFER_BUDGET + (1 << 20);
/// Bytes of data that each connection may always hold. A plain read or write that transfers more
/// is carried out in pieces of this size, one after the other.
pub const CONNECTION_BYTES: usize = 1 << 20;
// An ordered write is never in pieces, so it must fit into the own share.
const _: () = assert!(crate::wire::ORDERED_BYTES_MAX as usize <= CONNECTION_BYTES);
/// Bytes of data that all connections together may hold in addition to the [`CONNECTION_BYTES`] of
/// each, unless the target is configured otherwise.
pub const MEMORY_BYTES: usize = 1 << 30;
/// In-capsule data can't be made to wait, because it arrives with its command. So memory for the
/// most in-capsule data of a queue is reserved when the queue is connected. For all queues
/// together, this is at most so many times the memory for other data ([`MEMORY_BYTES`]).
pub const CAPSULES_TO_MEMORY: usize = 4;
/// The time limit from the first byte of a PDU to its last, ns. Before a Fabrics Connect has
/// succeeded, also the limit from the accept to the first PDU, and from one PDU to the next.
pub const STALL_NS: u64 = 10_000_000_000;
/// The time limit from the accept to a successful Fabrics Connect, ns. Refused commands do not
/// extend it (trap T28).
pub const CONNECT_NS: u64 = 3 * STALL_NS;
/// The time limit for an authentication, from Connect or from the begin of a later one, ns. It is long,
/// because a host without fast arithmetic needs many seconds for the largest Diffie-Hellman group. Linux's
/// target has the same limit.
pub const AUTHENTICATION_NS: u64 = 120_000_000_000;
/// The time limit for data that an R2T has requested, and for a peer that takes no bytes, ns.
pub const DATA_STALL_NS: u64 = 30_000_000_000;
/// The unit in which the target measures keep-alive timeouts, milliseconds (KAS counts 100 ms).
pub const KEEP_ALIVE_STEP_MS: u32 = 100;
/// The longest lease that a target grants, milliseconds: one day. A host that claims a volume and
/// then disappears blocks its namespaces for this time, except for a host that takes over (trap
/// T25).
pub const LEASE_MS_MAX: u32 = 24 * 60 * 60 * 1000;
/// The most log slots of one stream: 16 MiB of log, 16 times as many as the target itself chooses.
pub const STREAM_SLOTS_MAX: u32 = 1 << 18;
/// The most log slots of all streams of all volumes together: 2 GiB of log. A claim that would
/// exceed this limit is refused. A slot takes 16 bytes of memory, and another 64 if the log is a
/// block device, which may be far larger than the memory. Two volumes with the most streams fit,
/// each with as many slots as the target itself chooses.
pub const LOG_SLOTS_MAX: u64 = 1 << 25;
/// The most hosts that are registered for the reservations of one namespace (trap T28).
pub const REGISTRANTS_MAX: usize = 1024;
/// The most of these hosts that have the same NQN (trap T28).
pub const REGISTRANTS_OF_NQN_MAX: usize = 16;
/// The most errors that the log of a controller keeps (ELPE + 1).
pub const ERROR_ENTRIES: usize = 64;
/// The most notifications about reservations that a controller keeps for its host.
pub const RESERVATION_NOTIFICATIONS: usize = 64;
/// The most fences of one volume that wait for operations in flight at the same time.
pub const FENCES_MAX: usize = 64;
/// The highest seq that a host may release or start from. It is far beyond the last group of any
/// stream, and so low that arithmetic on it does not overflow.
pub const SEQ_MAX: u64 = 1 << 62;
