//! The options of streams and readers.

use std::time::Duration;

/// The largest queue depth of a stream and of a reader.
pub(crate) const QUEUE_DEPTH_MAX: usize = 1024;

/// The options of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// Requests in flight per target, 1 to 1024.
    pub queue_depth: usize,
    /// The bound of the replay memory, bytes: the payload that the stream keeps because it is not
    /// complete or not durable (trap T14). A single group may not be larger.
    pub kept_bytes_max: u64,
    /// Whether requests for adjacent blocks are merged (trap T16), up to the largest in-capsule
    /// data of a command (32 KiB on a Rio target). Whole groups are merged only while at least
    /// [`MERGE_FROM`](riopipe_session::initiator::stream_driver::MERGE_FROM) requests are in flight.
    /// A larger group takes several log entries.
    pub merge: bool,
    /// How long a target may owe an answer. After that the stream gives up the connection.
    pub timeout: Duration,
    /// The writes of the stream have no order, as those of engine `none`: a crash may leave any of
    /// the groups that are not durable, or parts of them. Of two writes in flight to one block, any
    /// may be the last, also without a crash. They pass the ordered writes of the other streams, and
    /// these pass them. A failed write affects this stream only.
    ///
    /// Only with engine `barrier`. A volume does not store this: each time a stream is opened, the
    /// caller chooses.
    pub orderless: bool,
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self {
            queue_depth: 128,
            kept_bytes_max: 64 << 20,
            merge: true,
            timeout: Duration::from_secs(30),
            orderless: false,
        }
    }
}

/// The options of a reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReaderOptions {
    /// How many calls may read at the same time, 1 to 64; others wait for their turn. Each has a
    /// connection to every target, which is made when it is first needed and kept.
    pub concurrent: usize,
    /// Requests in flight per target and call, 1 to 1024.
    pub queue_depth: usize,
    /// How long a target may owe an answer. After that its connection is given up and made anew.
    pub timeout: Duration,
}

impl Default for ReaderOptions {
    fn default() -> Self {
        Self { concurrent: 4, queue_depth: 32, timeout: Duration::from_secs(30) }
    }
}
