//! The bytes of the log's records: transactions and snapshots. All numbers are little endian. The
//! log adds lengths and checksums.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

/// Begins each snapshot: a magic and a version.
const MAGIC: &[u8; 6] = b"RSTO\x01\x00";

/// The kind of a record that changes nothing: it only carries a trim of the log.
const NOTHING: u8 = 0;
const TRANSACTION: u8 = 1;

const REMOVE: u8 = 1;
const STORE: u8 = 2;
const STORE_INLINE: u8 = 3;

/// The record that changes nothing.
pub(crate) const EMPTY: [u8; 1] = [NOTHING];

/// One change of one object, with all decisions taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The object has these blocks from its block `first` on.
    Store {
        name: String,
        /// The size of the object after the change, in bytes.
        size: u64,
        /// The first changed block of the object.
        first: u64,
        /// Whether blocks of the object beyond the new ones are removed.
        is_last: bool,
        /// The volume blocks of the new content.
        lbas: Vec<u64>,
        /// The new content, if it is in the record. The last block may be shorter than 4096 bytes:
        /// zeroes follow.
        inline: Option<Arc<Vec<u8>>>,
    },
    /// The object is removed.
    Remove { name: String },
}

/// Bytes that are no record or snapshot of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

/// Consecutive blocks among `lbas`, as `(first, count)`.
pub(crate) fn runs(lbas: &[u64]) -> impl Iterator<Item = (u64, u32)> {
    let mut rest = lbas;
    core::iter::from_fn(move || {
        let first = *rest.first()?;
        let count = rest.iter().zip(first..).take_while(|(lba, next)| **lba == *next).count();
        rest = &rest[count..];
        Some((first, count as u32))
    })
}

/// Bytes of an object in a snapshot.
pub(crate) fn object_bytes(name: &str, lbas: &[u64]) -> usize {
    2 + name.len() + 8 + 4 + 12 * runs(lbas).count()
}

fn put_name(out: &mut Vec<u8>, name: &str) {
    out.extend_from_slice(&(name.len() as u16).to_le_bytes());
    out.extend_from_slice(name.as_bytes());
}

fn put_lbas(out: &mut Vec<u8>, lbas: &[u64]) {
    out.extend_from_slice(&(runs(lbas).count() as u32).to_le_bytes());
    for (first, count) in runs(lbas) {
        out.extend_from_slice(&first.to_le_bytes());
        out.extend_from_slice(&count.to_le_bytes());
    }
}

/// The record of a transaction.
pub(crate) fn encode(number: u64, changes: &[Change]) -> Vec<u8> {
    let mut out = Vec::from([TRANSACTION]);
    out.extend_from_slice(&number.to_le_bytes());
    out.extend_from_slice(&(changes.len() as u32).to_le_bytes());
    for change in changes {
        match change {
            Change::Remove { name } => {
                out.push(REMOVE);
                put_name(&mut out, name);
            }
            Change::Store { name, size, first, is_last, lbas, inline } => {
                out.push(if inline.is_some() { STORE_INLINE } else { STORE });
                put_name(&mut out, name);
                out.extend_from_slice(&size.to_le_bytes());
                out.extend_from_slice(&first.to_le_bytes());
                out.push(u8::from(*is_last));
                put_lbas(&mut out, lbas);
                if let Some(bytes) = inline {
                    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
                    out.extend_from_slice(bytes);
                }
            }
        }
    }
    out
}

/// The transaction of a record: its number and its changes; `None` if the record changes nothing.
pub(crate) fn decode(bytes: &[u8]) -> Result<Option<(u64, Vec<Change>)>, Malformed> {
    let mut input = Input(bytes);
    match input.byte()? {
        NOTHING => return input.end().map(|()| None),
        TRANSACTION => {}
        _ => return Err(Malformed),
    }
    let number = input.u64()?;
    let mut changes = Vec::new();
    for _ in 0..input.u32()? {
        let kind = input.byte()?;
        let name = input.name()?;
        changes.push(match kind {
            REMOVE => Change::Remove { name },
            STORE | STORE_INLINE => Change::Store {
                name,
                size: input.u64()?,
                first: input.u64()?,
                is_last: input.byte()? != 0,
                lbas: input.lbas()?,
                inline: match kind {
                    STORE => None,
                    _ => {
                        let len = input.u32()? as usize;
                        Some(Arc::new(input.take(len)?.to_vec()))
                    }
                },
            },
            _ => return Err(Malformed),
        });
    }
    input.end()?;
    Ok(Some((number, changes)))
}

/// The head of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// First block of the data place.
    pub(crate) lba: u64,
    /// Blocks of the data place.
    pub(crate) blocks: u64,
    /// The number of the last transaction in the snapshot.
    pub(crate) number: u64,
}

/// Bytes of a snapshot's head.
pub(crate) const HEAD_BYTES: usize = MAGIC.len() + 3 * 8 + 8;

/// A snapshot with these objects: name, size, volume blocks.
pub(crate) fn encode_snapshot<'a>(
    head: Head,
    objects: impl ExactSizeIterator<Item = (&'a str, u64, &'a [u64])>,
) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    for number in [head.lba, head.blocks, head.number, objects.len() as u64] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    for (name, size, lbas) in objects {
        put_name(&mut out, name);
        out.extend_from_slice(&size.to_le_bytes());
        put_lbas(&mut out, lbas);
    }
    out
}

/// The head and the objects of a snapshot.
pub(crate) type Snapshot = (Head, Vec<(String, u64, Vec<u64>)>);

pub(crate) fn decode_snapshot(bytes: &[u8]) -> Result<Snapshot, Malformed> {
    let mut input = Input(bytes);
    if input.take(MAGIC.len())? != MAGIC {
        return Err(Malformed);
    }
    let head = Head { lba: input.u64()?, blocks: input.u64()?, number: input.u64()? };
    let mut objects = Vec::new();
    for _ in 0..input.u64()? {
        objects.push((input.name()?, input.u64()?, input.lbas()?));
    }
    input.end()?;
    Ok((head, objects))
}

/// Bytes that are read from their front.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.take(N)?.try_into().map_err(|_| Malformed)
    }

    fn byte(&mut self) -> Result<u8, Malformed> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    fn name(&mut self) -> Result<String, Malformed> {
        let len = usize::from(self.array().map(u16::from_le_bytes)?);
        String::from_utf8(self.take(len)?.to_vec()).map_err(|_| Malformed)
    }

    fn lbas(&mut self) -> Result<Vec<u64>, Malformed> {
        let mut lbas = Vec::new();
        for _ in 0..self.u32()? {
            let (first, count) = (self.u64()?, self.u32()?);
            // The records have checksums: this limit only keeps a foreign log from using all memory.
            if count > 1 << 28 {
                return Err(Malformed);
            }
            lbas.extend(first..first.checked_add(u64::from(count)).ok_or(Malformed)?);
        }
        Ok(lbas)
    }

    fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed) }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn what_was_encoded_is_decoded_and_no_cut_record_is() {
        let inline = Some(Arc::new(vec![7; 30]));
        let changes = [
            Change::Remove { name: "gone".into() },
            Change::Store {
                name: "a".into(),
                size: 8000,
                first: 1,
                is_last: true,
                lbas: vec![5, 6, 9],
                inline: None,
            },
            Change::Store {
                name: "b".into(),
                size: 30,
                first: 0,
                is_last: false,
                lbas: vec![77],
                inline,
            },
        ];
        let record = encode(3, &changes);
        assert_eq!(decode(&record), Ok(Some((3, changes.to_vec()))));
        assert_eq!(decode(&EMPTY), Ok(None));
        let head = Head { lba: 100, blocks: 50, number: 3 };
        let lbas = [100u64, 101, 130];
        let snapshot = encode_snapshot(head, [("a", 9000, &lbas[..])].into_iter());
        assert_eq!(snapshot.len(), HEAD_BYTES + object_bytes("a", &lbas));
        let objects = vec![("a".into(), 9000, lbas.to_vec())];
        assert_eq!(decode_snapshot(&snapshot), Ok((head, objects)));
        for len in 0..record.len() {
            assert_eq!(decode(&record[..len]), Err(Malformed));
        }
        for len in 0..snapshot.len() {
            assert_eq!(decode_snapshot(&snapshot[..len]), Err(Malformed));
        }
    }
}
