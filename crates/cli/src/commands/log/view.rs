//! A log region in the form that `rio log dump` prints.

use riopipe_lab::{
    table::{Align, Table},
    terminal::{Colour, Terminal},
    units,
};
use riopipe_order::attribute::{Flags, Kind};
use riopipe_order::log_region::{RegionHeader, VolumeRecord, VolumeState};
use riopipe_order::ordering_log::{LogError, LoggedEntry, Scan};
use riopipe_target::{LOG_SLOTS_MAX, STREAM_SLOTS_MAX};
use serde::Serialize;

use crate::output::Report;

/// The reason why a partition isn't shown.
#[derive(Debug, thiserror::Error)]
pub(super) enum PartitionError {
    /// Its content can't be read.
    #[error(transparent)]
    Log(#[from] LogError),
    /// By the header it has more slots than any target keeps, alone or with those before it.
    #[error(
        "stream {stream} is not read: by the header it has {slots} slots, more than a target keeps \
         ({STREAM_SLOTS_MAX} for a stream, {LOG_SLOTS_MAX} in a log)"
    )]
    TooLarge {
        /// The stream.
        stream: u16,
        /// The number of its slots.
        slots: u32,
    },
}

/// The whole region.
#[derive(Debug, Serialize)]
pub(super) struct RegionView {
    schema: &'static str,
    region: String,
    kind: &'static str,
    bytes: u64,
    uuid: String,
    boot: String,
    this_boot: bool,
    /// Whether a target would accept it (trap T19).
    trusted: bool,
    served: bool,
    incarnation: u32,
    header_writes: u64,
    pub(super) volumes: Vec<VolumeView>,
}

/// A volume in its directory.
#[derive(Debug, Serialize)]
pub(super) struct VolumeView {
    id: String,
    generation: u32,
    state: &'static str,
    owner: Option<String>,
    streams: u16,
    slots: u32,
    offset: u64,
    members: Vec<MemberView>,
    partitions: Vec<PartitionView>,
}

#[derive(Debug, Serialize)]
struct MemberView {
    member: u8,
    nsid: u32,
}

/// The log of one stream.
#[derive(Debug, Serialize)]
pub(super) struct PartitionView {
    stream: u16,
    /// The reason why it can't be read; the other fields are then empty.
    error: Option<String>,
    #[serde(flatten)]
    found: Option<Found>,
}

#[derive(Debug, Serialize)]
struct Found {
    released: u64,
    /// The newest released group in the log, and its tag.
    tag_seq: u64,
    tag: u64,
    settled: bool,
    generation: u32,
    incarnation: u32,
    live: usize,
    torn: u32,
    stale: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    entries: Option<Vec<EntryView>>,
}

#[derive(Debug, Serialize)]
struct EntryView {
    position: u64,
    seq: u64,
    span: u16,
    num: u16,
    index: u16,
    ordinal: u32,
    member: u8,
    kind: &'static str,
    flags: Vec<&'static str>,
    lba: u64,
    blocks: u32,
    tag: u64,
    persisted: bool,
    generation: u32,
    incarnation: u32,
}

impl RegionView {
    pub(super) fn new(
        region: &str,
        header: &RegionHeader,
        boot: [u8; 16],
        served: bool,
        trusted: bool,
    ) -> Self {
        Self {
            schema: "rio-log/1",
            region: region.to_owned(),
            kind: header.kind.name(),
            bytes: header.len,
            uuid: hex(&header.uuid),
            boot: hex(&header.boot),
            this_boot: header.boot == boot,
            trusted,
            served,
            incarnation: header.incarnation,
            header_writes: header.number,
            volumes: Vec::new(),
        }
    }
}

impl VolumeView {
    pub(super) fn new(volume: &VolumeRecord, partitions: Vec<PartitionView>) -> Self {
        let members = volume.members.iter();
        Self {
            id: volume.id.to_string(),
            generation: volume.generation,
            state: match volume.state {
                VolumeState::Closed => "closed",
                VolumeState::Owned => "owned",
            },
            owner: (volume.owner != [0; 16]).then(|| hex(&volume.owner)),
            streams: volume.streams,
            slots: volume.slots,
            offset: volume.offset,
            members: members.map(|m| MemberView { member: m.member.0, nsid: m.nsid }).collect(),
            partitions,
        }
    }
}

impl PartitionView {
    pub(super) fn new(stream: u16, found: Result<Scan, PartitionError>, entries: bool) -> Self {
        match found {
            Err(error) => Self { stream, error: Some(error.to_string()), found: None },
            Ok(scan) => Self {
                stream,
                error: None,
                found: Some(Found {
                    released: scan.released.0,
                    tag_seq: scan.newest_tag.seq.0,
                    tag: scan.newest_tag.tag,
                    settled: scan.settled,
                    generation: scan.origin.generation,
                    incarnation: scan.origin.incarnation,
                    live: scan.entries.len(),
                    torn: scan.torn,
                    stale: scan.stale,
                    entries: entries.then(|| scan.entries.iter().map(EntryView::new).collect()),
                }),
            },
        }
    }
}

impl EntryView {
    fn new(entry: &LoggedEntry) -> Self {
        let a = &entry.attribute;
        let names = [
            (Flags::BOUNDARY, "boundary"),
            (Flags::FLUSH, "flush"),
            (Flags::IN_PLACE, "in_place"),
            (Flags::SPLIT, "split"),
            (Flags::EXTEND, "extend"),
            (Flags::REDIRECTED, "redirected"),
        ];
        Self {
            position: entry.position.0,
            seq: a.seq.0,
            span: a.span,
            num: a.num,
            index: a.index,
            ordinal: a.ordinal,
            member: a.member.0,
            kind: match a.kind {
                Kind::Write => "write",
                Kind::Discard => "discard",
                Kind::Flush => "flush",
            },
            flags: names.into_iter().filter(|(flag, _)| a.flags.has(*flag)).map(|f| f.1).collect(),
            lba: a.lba,
            blocks: a.blocks,
            tag: a.tag,
            persisted: entry.persisted,
            generation: entry.origin.generation,
            incarnation: entry.origin.incarnation,
        }
    }
}

/// In the form of a UUID.
fn hex(id: &[u8; 16]) -> String {
    riopipe_order::attribute::VolumeId(*id).to_string()
}

impl Report for RegionView {
    fn text(&self, terminal: &Terminal) -> String {
        let mut text = format!(
            "{}: {}, {}, incarnation {}, {}{}\nregion {}, last served in boot {}{}\n",
            self.region,
            self.kind,
            units::bytes(self.bytes),
            self.incarnation,
            match self.volumes.len() {
                1 => "1 volume".to_owned(),
                count => format!("{count} volumes"),
            },
            if self.served { ", being served" } else { "" },
            self.uuid,
            self.boot,
            match (self.this_boot, self.trusted) {
                (true, _) => " (this one)",
                (false, true) => "",
                (false, false) => " (another one: not valid)",
            },
        );
        for volume in &self.volumes {
            text += &volume.text(terminal);
        }
        text
    }
}

impl VolumeView {
    fn text(&self, terminal: &Terminal) -> String {
        let head = format!("volume {}", self.id);
        let members: Vec<String> = self
            .members
            .iter()
            .map(|m| format!("member {} is namespace {}", m.member, m.nsid))
            .collect();
        let mut text = format!(
            "\n{}: generation {}, {}, {} streams of {} slots\n{}{}\n\n",
            terminal.paint(Colour::Bold, &head),
            self.generation,
            self.state,
            self.streams,
            self.slots,
            members.join(", "),
            self.owner.as_ref().map_or_else(String::new, |owner| format!(", last owner {owner}")),
        );
        let mut table = Table::new(&[
            ("stream", Align::Right),
            ("released", Align::Right),
            ("tag", Align::Left),
            ("live", Align::Right),
            ("torn", Align::Right),
            ("stale", Align::Right),
            ("bound by", Align::Left),
            ("", Align::Left),
        ]);
        for partition in &self.partitions {
            table.row(partition.row(terminal));
        }
        text += &table.render(terminal);
        for partition in &self.partitions {
            text += &partition.text(terminal);
        }
        text
    }
}

impl PartitionView {
    fn row(&self, terminal: &Terminal) -> [String; 8] {
        let Some(found) = &self.found else {
            let error = self.error.as_deref().unwrap_or_default();
            let mut row = [const { String::new() }; 8];
            row[0] = self.stream.to_string();
            row[7] = terminal.paint(Colour::Red, error);
            return row;
        };
        let incarnation =
            format!("generation {}, incarnation {}", found.generation, found.incarnation);
        [
            self.stream.to_string(),
            found.released.to_string(),
            match found.tag_seq {
                0 => String::new(),
                seq => format!("{:#x} of group {seq}", found.tag),
            },
            found.live.to_string(),
            found.torn.to_string(),
            found.stale.to_string(),
            incarnation,
            if found.settled { "settled" } else { "" }.to_owned(),
        ]
    }

    fn text(&self, terminal: &Terminal) -> String {
        let entries = self.found.as_ref().and_then(|found| found.entries.as_deref());
        let entries = entries.unwrap_or_default();
        if entries.is_empty() {
            return String::new();
        }
        let mut table = Table::new(&[
            ("position", Align::Right),
            ("group", Align::Right),
            ("entry", Align::Right),
            ("ordinal", Align::Right),
            ("member", Align::Right),
            ("kind", Align::Left),
            ("blocks", Align::Left),
            ("persisted", Align::Left),
            ("flags", Align::Left),
            ("tag", Align::Left),
            ("incarnation", Align::Left),
        ]);
        for entry in entries {
            table.row([
                entry.position.to_string(),
                match entry.span {
                    1 => entry.seq.to_string(),
                    span => format!("{}–{}", entry.seq, entry.seq + u64::from(span) - 1),
                },
                format!("{} of {}", u32::from(entry.index) + 1, entry.num),
                entry.ordinal.to_string(),
                entry.member.to_string(),
                entry.kind.to_owned(),
                match entry.blocks {
                    0 => String::new(),
                    1 => entry.lba.to_string(),
                    blocks => format!("{} + {blocks}", entry.lba),
                },
                if entry.persisted { "yes" } else { "no" }.to_owned(),
                entry.flags.join(" "),
                if entry.tag == 0 { String::new() } else { format!("{:#x}", entry.tag) },
                format!("{}.{}", entry.generation, entry.incarnation),
            ]);
        }
        let head = format!("stream {}", self.stream);
        format!("\n{}\n{}", terminal.paint(Colour::Bold, &head), table.render(terminal))
    }
}
