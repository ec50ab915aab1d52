//! A scripted target for tests: bytes in, bytes out, written from the specification without the
//! encoders of `riopipe-nvme`.

use alloc::vec::Vec;
use std::vec;

/// The script's answer to one command.
pub(super) enum Answer {
    /// A completion with this result.
    Result(u64),
    /// Data, then a successful completion.
    Data(Vec<u8>),
    /// A completion with this status (SCT and SC).
    Status(u16),
    /// Nothing, for now.
    Withheld,
}

/// A 4096-byte page with byte strings placed at offsets.
pub(super) fn page(fields: &[(usize, &[u8])]) -> Vec<u8> {
    let mut b = vec![0; 4096];
    for (at, bytes) in fields {
        b[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    b
}

pub(super) fn le(b: &[u8], at: usize, len: usize) -> u64 {
    (0..len).rev().fold(0, |v, i| v << 8 | u64::from(b[at + i]))
}

/// Decodes the PDUs in `sent` without the decoders under test; answers ICReq, and each command with
/// the result of `answer`.
pub(super) fn respond(sent: &[u8], mut answer: impl FnMut(&[u8]) -> Answer) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = sent;
    while !rest.is_empty() {
        let (pdu, tail) = rest.split_at(le(rest, 4, 4) as usize);
        rest = tail;
        match pdu[0] {
            0x00 => {
                let mut icresp = vec![0; 128];
                icresp[..8].copy_from_slice(&[1, 0, 128, 0, 128, 0, 0, 0]);
                icresp[12..16].copy_from_slice(&[0, 0, 2, 0]);
                out.extend(icresp);
            }
            0x04 => {
                let sqe = &pdu[8..72];
                let (result, status) = match answer(sqe) {
                    Answer::Withheld => continue,
                    Answer::Result(result) => (result, 0),
                    Answer::Status(status) => (0, status),
                    Answer::Data(data) => {
                        assert_eq!(data.len() as u64, le(sqe, 32, 4), "as much as was asked for");
                        out.extend([7, 4, 24, 24]);
                        out.extend((24 + data.len() as u32).to_le_bytes());
                        out.extend([sqe[2], sqe[3], 0, 0, 0, 0, 0, 0]);
                        out.extend((data.len() as u32).to_le_bytes());
                        out.extend([0; 4]);
                        out.extend(data);
                        (0, 0)
                    }
                };
                out.extend(completion(sqe, result, status));
            }
            other => panic!("PDU {other:#x} was not expected"),
        }
    }
    out
}

/// The completion of one command.
pub(super) fn completion(sqe: &[u8], result: u64, status: u16) -> Vec<u8> {
    let mut out = vec![5, 0, 24, 0, 24, 0, 0, 0];
    out.extend(result.to_le_bytes());
    out.extend([0, 0, 0, 0, sqe[2], sqe[3]]);
    out.extend((status << 1).to_le_bytes());
    out
}
