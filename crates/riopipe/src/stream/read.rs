//! Reading with a stream: in a call that waits, or by reads that are submitted and end later.

use std::time::Duration;

use riopipe_session::initiator::stream_driver::READS_MAX;

use super::Stream;
use crate::error::ReadError;
use crate::owner_call::OwnerCall;
use crate::reading::{ReadExtent, Reads, blocks_in_volume};
use crate::submitted_reads::{ReadEnd, ReadId, ReadMemory, ReadNotSubmitted};

impl Stream {
    /// Reads whole blocks at volume block `lba` into `into`, and waits for them for `timeout` at
    /// most; `None` means without limit. The read returns the data of all writes that this stream
    /// has submitted, also of incomplete groups (promise P9). While a target is unreachable, or
    /// while requests are replayed to it, the read waits.
    ///
    /// # Errors
    /// [`ReadError`]: the blocks are out of range, the time is up, the drive failed, or the stream
    /// has failed. The content of the buffer is not defined then.
    pub fn read(
        &mut self,
        lba: u64,
        into: &mut [u8],
        timeout: Option<Duration>,
    ) -> Result<(), ReadError> {
        self.read_many(&mut [ReadExtent { lba, into }], timeout)
    }

    /// As [`read`](Self::read), for several extents at once: in one round trip, as far as the queue
    /// depth allows.
    ///
    /// ```no_run
    /// # fn index(mut stream: riopipe::Stream) -> Result<(), riopipe::ReadError> {
    /// use riopipe::ReadExtent;
    ///
    /// let (mut root, mut leaf) = (vec![0; 4096], vec![0; 8192]);
    /// let mut both = [
    ///     ReadExtent { lba: 0, into: &mut root },
    ///     ReadExtent { lba: 900, into: &mut leaf },
    /// ];
    /// stream.read_many(&mut both, Some(std::time::Duration::from_secs(1)))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`read`](Self::read). An error of one extent is the error of the call.
    pub fn read_many(
        &mut self,
        extents: &mut [ReadExtent<'_>],
        timeout: Option<Duration>,
    ) -> Result<(), ReadError> {
        let extents = extents.iter_mut().map(|extent| (extent.lba, &mut *extent.into));
        let mut reads = Reads::new(extents, self.volume.topology.blocks())?;
        let mut shell = OwnerCall::begin(&self.shell, &self.handle, &self.background);
        reads.run(&mut shell, &mut self.spin, timeout)
    }

    /// Submits a read of whole blocks at volume block `lba`, and does not wait for it. The length of
    /// the memory is the length of the read. The stream has the memory until the end of the read is
    /// [taken](Self::take_read). Up to 1024 reads may be submitted at a time. They end in any order.
    /// The read is given up after `timeout`; `None` means never.
    ///
    /// The read returns the data of all writes that the stream has submitted before it, also of
    /// incomplete groups (promise P9). Of a group that is submitted while the read is in flight, each
    /// block has the old content or the new.
    ///
    /// The read leaves as a group that is not durable does ([when bytes
    /// leave](Self#when-bytes-leave)). It goes on in every call that receives, and between the calls
    /// in the background thread. A failure of the stream ends all of its reads. Closing or dropping
    /// the stream drops them with their memory.
    ///
    /// ```no_run
    /// # fn scan(mut stream: riopipe::Stream) -> Result<(), Box<dyn std::error::Error>> {
    /// use riopipe::Until;
    ///
    /// for lba in 0..32 {
    ///     stream.submit_read(lba, vec![0; 4096], None)?;
    /// }
    /// for _ in 0..32 {
    ///     let end = loop {
    ///         if let Some(end) = stream.take_read() {
    ///             break end;
    ///         }
    ///         stream.wait(Until::ReadEnded, None)?;
    ///     };
    ///     let block: Vec<u8> = end.into_memory()?.expect("all reads have this type");
    ///     println!("{}", block[0]);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ReadNotSubmitted`] contains the memory: the blocks are out of range, 1024 reads are
    /// submitted, or the stream has failed.
    pub fn submit_read<M: ReadMemory>(
        &mut self,
        lba: u64,
        memory: M,
        timeout: Option<Duration>,
    ) -> Result<ReadId, ReadNotSubmitted<M>> {
        let (bytes, volume) = (memory.length(), self.volume.topology.blocks());
        let Some(blocks) = blocks_in_volume(lba, bytes, volume) else {
            let error = ReadError::OutOfRange { lba, bytes, volume };
            return Err(ReadNotSubmitted { error, memory });
        };
        let mut shell = self.begin_call();
        if shell.reads.is_full() {
            return Err(ReadNotSubmitted { error: ReadError::Full(READS_MAX), memory });
        }
        if let Err(failure) = shell.publish_marks() {
            return Err(ReadNotSubmitted { error: failure.into(), memory });
        }
        Ok(shell.submit_read(lba, blocks, Box::new(memory), timeout))
    }

    /// Takes the end of a submitted read. `None`: no other read has ended, as far as the calls of the
    /// stream have found. Neither sends nor receives: [`poll`](Self::poll) does, and
    /// [`wait`](Self::wait) until [`ReadEnded`](crate::Until::ReadEnded).
    pub fn take_read(&mut self) -> Option<ReadEnd> {
        self.begin_call().take_read_end()
    }

    /// Cancels a submitted read: it ends now, with [`ReadError::Cancelled`], and no byte is written to
    /// its memory any more. Its end is taken as that of any read. Returns false if the read has ended
    /// before, which changes nothing.
    pub fn cancel_read(&mut self, id: ReadId) -> bool {
        self.begin_call().cancel_read(id)
    }
}
