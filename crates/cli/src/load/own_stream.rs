//! A stream that one writer has alone.

use std::collections::VecDeque;

use riopipe::{Buf, Place, ReadExtent, Seq, Stream, SubmitError, SubmitErrorKind, Until};
use riopipe_lab::{generator::Extent, workload::BLOCK};

use super::Queue;
use crate::failure::Failure;

/// The stream, and the groups on it.
pub(super) struct OwnStream {
    stream: Stream,
    /// The groups that are not known to be complete.
    in_flight: VecDeque<Seq>,
    complete: u64,
    /// The buffers of a group that was refused.
    spare: Vec<Buf>,
}

impl OwnStream {
    pub(super) fn new(stream: Stream) -> Self {
        Self { stream, in_flight: VecDeque::new(), complete: 0, spare: Vec::new() }
    }
}

impl Queue for OwnStream {
    fn read(&mut self, extents: &[Extent], into: &mut Vec<u8>) -> Result<(), Failure> {
        let lens = extents.iter().map(|extent| extent.blocks as usize * BLOCK as usize);
        into.resize(into.len().max(lens.clone().sum()), 0);
        let mut rest = into.as_mut_slice();
        let mut reads = Vec::with_capacity(extents.len());
        for (extent, len) in extents.iter().zip(lens) {
            let (into, behind) = rest.split_at_mut(len);
            rest = behind;
            reads.push(ReadExtent { lba: extent.lba, into });
        }
        self.stream.read_many(&mut reads, None).map_err(|error| Failure::storage(&error))
    }

    fn submit(&mut self, extents: &[Extent]) -> Result<bool, Failure> {
        if self.spare.is_empty() {
            self.spare = buffers(&mut self.stream, extents)?;
        }
        match group(&mut self.stream, extents, self.spare.drain(..)).submit() {
            Ok(seq) => {
                self.in_flight.push_back(seq);
                Ok(true)
            }
            Err(SubmitError { kind: SubmitErrorKind::Full(_), bufs }) => {
                self.spare = bufs;
                Ok(false)
            }
            Err(SubmitError { kind, .. }) => Err(Failure::storage(&kind)),
        }
    }

    fn wait(&mut self, groups: Option<u64>) -> Result<u64, Failure> {
        let until = match groups.and_then(|number| number.checked_sub(self.complete + 1)) {
            // The caller counts the groups that it has submitted.
            Some(index) => Until::Complete(self.in_flight[index as usize]),
            None => Until::Space,
        };
        let marks = self.stream.wait(until, None).map_err(|error| Failure::storage(&error))?;
        while self.in_flight.front().is_some_and(|seq| *seq <= marks.complete) {
            self.in_flight.pop_front();
            self.complete += 1;
        }
        Ok(self.complete)
    }

    fn close(self) -> Result<(), Failure> {
        self.stream.close().map(|_| ()).map_err(|error| Failure::storage(&error))
    }
}

/// A buffer for each write. Their content does not matter.
pub(super) fn buffers(stream: &mut Stream, extents: &[Extent]) -> Result<Vec<Buf>, Failure> {
    let buffer = |extent: &Extent| stream.buf((extent.blocks * BLOCK) as usize);
    extents.iter().map(buffer).collect::<Result<_, _>>().map_err(|error| Failure::storage(&error))
}

/// The group of these writes.
pub(super) fn group<'a>(
    stream: &'a mut Stream,
    extents: &[Extent],
    buffers: impl Iterator<Item = Buf>,
) -> riopipe::Group<'a> {
    // The area is written again and again, so its blocks are never fresh.
    let write = |group: riopipe::Group<'a>, (extent, buffer): (&Extent, Buf)| {
        group.write(extent.lba, buffer, Place::InPlace)
    };
    extents.iter().zip(buffers).fold(stream.group(), write)
}
