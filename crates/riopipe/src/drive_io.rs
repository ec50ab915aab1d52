//! Labels on drives: a few blocks, read and written one at a time.

use riopipe_nvme::command::Sqe;
use riopipe_session::label::{DATA_START, LABEL_LEN, Label, LabelError};

use crate::association::{Association, CallData, Caller, open_socket};
use crate::error::{AttachError, CallError};
use crate::identity::ConnectOptions;
use crate::piece::Buf;

/// The queue that labels go over; streams have the others.
pub(crate) const LABEL_QUEUE: u16 = 1;

/// A target's drives, for labels.
pub(crate) struct DriveIo(Caller);

impl DriveIo {
    pub(crate) fn open(
        target: &Association,
        options: &ConnectOptions,
    ) -> Result<Self, AttachError> {
        let socket = open_socket(&target.addr, options)?;
        Caller::open(socket, target.io_queue(LABEL_QUEUE, 31), options.timeout).map(Self).map_err(
            |source| AttachError::Target {
                target: target.name(),
                nqn: target.addr.nqn.clone(),
                source,
            },
        )
    }

    /// The label in the first two blocks.
    pub(crate) fn label(&mut self, nsid: u32) -> Result<Result<Label, LabelError>, CallError> {
        let len = 2 * LABEL_LEN;
        let (_, page) = self.0.call(Sqe::read(nsid, 0, 2), CallData::Read(len as u32))?;
        let (a, b) = page.split_at(LABEL_LEN);
        Ok(Label::newest([a, b], crate::crc32c))
    }

    /// Makes the first blocks of the data area read as zeroes, so that what an earlier volume kept
    /// there is not taken for the new one's.
    pub(crate) fn blank_data(&mut self, nsid: u32) -> Result<(), CallError> {
        let buf = Buf::zeroed(LABEL_LEN);
        self.0.call(Sqe::write(nsid, DATA_START, 1), CallData::Piece(buf.piece()))?;
        self.0.call(Sqe::flush(nsid), CallData::None)?;
        Ok(())
    }

    /// Writes a label to its block and makes it durable.
    pub(crate) fn write_label(&mut self, nsid: u32, label: &Label) -> Result<(), CallError> {
        let mut buf = Buf::zeroed(LABEL_LEN);
        buf.copy_from_slice(&label.encode(crate::crc32c));
        let lba = Label::block_of(label.sequence);
        self.0.call(Sqe::write(nsid, lba, 1), CallData::Piece(buf.piece()))?;
        self.0.call(Sqe::flush(nsid), CallData::None)?;
        Ok(())
    }
}
