//! The errors of making and closing a device.

use riopipe::{AcknowledgeError, StreamError, SubmitErrorKind};
use riopipe_session::initiator::plain_device::LayoutError;

/// Why a volume can't be used as a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The engine keeps no order.
    #[error(
        "the volume runs engine none, which promises nothing after a crash: a block device can't be \
         made of it; create it with engine rio, or sync"
    )]
    NoOrder,
    /// More streams are asked for than there are.
    #[error(
        "{wanted} streams are asked for, and the volume has {streams}: a device needs at least 1"
    )]
    TooFewStreams {
        /// The streams of the options.
        wanted: u16,
        /// The streams of the volume.
        streams: u16,
    },
    /// The list of in-place updates of a stream can't be acknowledged.
    #[error("stream {stream}: {source}")]
    Acknowledge {
        /// The stream.
        stream: u16,
        /// The reason.
        source: AcknowledgeError,
    },
    /// A stream can't be opened.
    #[error("stream {stream}: {source}")]
    Stream {
        /// The stream.
        stream: u16,
        /// The reason.
        source: StreamError,
    },
    /// No stream takes even a single block.
    #[error("not even a write of one block fits into a stream: {0}")]
    TooSmall(SubmitErrorKind),
    /// The volume has no blocks, or no streams.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// No thread can be started.
    #[error("can't start a thread: {0}")]
    Thread(std::io::Error),
}

/// Why a device was not closed in order.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// The device had failed before.
    #[error(
        "the device has failed before its end ({0}): writes that were not flushed may be lost; the \
         volume is recovered when it is opened again"
    )]
    Failed(String),
    /// A stream could not be closed.
    #[error(
        "not all writes are known to be durable ({0}): those that were not flushed may be lost; the \
         volume is recovered when it is opened again"
    )]
    Stream(String),
    /// The volume could not be closed.
    #[error("all writes are durable, but the volume was not closed: {0}")]
    Volume(String),
}
